"""Checks of rotations that a server applies: what vLLM demands of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from steelyard.formats.served_rotation import SERVED_TYPES, ServedRotation
from steelyard.fusion import expert_groups, fused_groups
from steelyard.kernels.hadamard import hadamard_factors
from steelyard.model.inputs import output_head
from steelyard.model.served_hooks import rotated_modules

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan

__all__ = ["rotation_errors", "rotation_warnings"]


def rotation_errors(plan: Plan, model: Any) -> Iterator[str]:
    """Yield rotations that vLLM refuses, or would get wrong."""
    taken: dict[tuple[str, str], str] = {}
    groups = [rotation.group for rotation in plan.served]
    for group in sorted({each for each in groups if groups.count(each) > 1}):
        yield f"two modifiers have a rotation {group}: remove one of them"
    for rotation in plan.served:
        label = f"rotation {rotation.group}"
        modules = dict(rotated_modules(model, rotation))
        if not modules:
            shown = ", ".join(rotation.targets)
            yield f"{label}: no Linear of the model matches {shown}"
        if rotation.kind not in SERVED_TYPES:
            yield (
                f"{label}: vLLM and compressed-tensors scale a {rotation.kind} in different ways "
                "when it is served; set transform_type to hadamard or random-hadamard"
            )
        yield from _unserved(label, rotation, modules, model)
        yield from _sizes(label, rotation, modules)
        for name in modules:
            other = taken.setdefault((name, rotation.side), rotation.group)
            if other != rotation.group:
                yield f"{name}: rotations {other} and {rotation.group} both rotate its input"
                break


def _unserved(
    label: str, rotation: ServedRotation, modules: dict[str, Any], model: Any
) -> Iterator[str]:
    """Yield modules whose inputs or outputs vLLM does not rotate."""
    biased = [name for name, module in modules.items() if module.bias is not None]
    if biased:
        shown = _some(biased, "has a bias", "have biases")
        yield f"{label}: {shown}, with which vLLM rotates nothing; leave them out"
    groups = expert_groups(modules)
    experts = [name for group in groups for names in group.experts.values() for name in names]
    if experts:
        shown = _some(experts, "is an expert", "are experts")
        yield f"{label}: {shown}, of which vLLM rotates nothing; leave them out"
    if output_head(model) in modules:
        yield f"{label}: vLLM rotates no input of {output_head(model)}; ignore it"
    everything = [name for name, _ in model.named_modules()]
    for group in fused_groups(everything):
        inside = [name for name in group if name in modules]
        if inside and len(inside) < len(group):
            missing = next(name for name in group if name not in modules)
            yield f"{label}: rotates {inside[0]} but not {missing}, and vLLM fuses them"
            return


def _sizes(label: str, rotation: ServedRotation, modules: dict[str, Any]) -> Iterator[str]:
    if rotation.kind not in SERVED_TYPES:
        return
    axis = 1 if rotation.side == "input" else 0
    for name, module in modules.items():
        width = module.weight.shape[axis]
        size = rotation.size(tuple(module.weight.shape))
        if width % size:
            yield f"{label}: transform_block_size {size} does not divide the {width} of {name}"
            return
        if rotation.kind == "hadamard" and size & (size - 1):
            yield (
                f"{label}: {size} channels of {name} are no power of two, which vLLM needs for the "
                "type hadamard; set transform_type to random-hadamard, or transform_block_size to "
                f"{width & -width}"
            )
            return
        if hadamard_factors(size) is None:
            yield (
                f"{label}: no Hadamard matrix of {size} is known for {name}; set "
                f"transform_block_size to {width & -width}"
            )
            return


def rotation_warnings(plan: Plan) -> Iterator[str]:
    if not plan.served:
        return
    import transformers

    groups = " and ".join(rotation.group for rotation in plan.served)
    yield (
        f"{groups} runs while the model is served: vLLM does so on one GPU only, without tensor "
        f"parallelism, and transformers {transformers.__version__} does not, so that a model "
        "loaded with it computes something else"
    )


def _some(names: list[str], single: str, several: str) -> str:
    if len(names) == 1:
        return f"{names[0]} {single}"
    return f"{names[0]} and {len(names) - 1} more {several}"
