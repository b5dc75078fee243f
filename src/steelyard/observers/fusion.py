"""Which layers the server fuses, and linking their weight observers.

vLLM stores q, k and v as one matrix, and gate and up as one. Where the format has a single scale
for that matrix (NVFP4's global scale, a per-tensor FP8 scale), the partners must agree on it
before they are quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from steelyard.errors import FusionError

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

__all__ = [
    "FUSED_LAYER_NAMES",
    "decided_together",
    "disagreement",
    "fuse_weight_observers",
    "fused_groups",
]

FUSED_LAYER_NAMES: list[tuple[str, ...]] = [
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
]
"""Attribute names of sibling layers that the server merges into one."""

_ONE_SCALE = ("tensor", "tensor_group")  # strategies in which merged layers share a scale

_FORMAT_FIELDS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "scale_dtype",
)


def fused_groups(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the modules among `names` that the server merges, group by group.

    >>> list(fused_groups(["attn.q_proj", "attn.o_proj", "attn.k_proj"]))
    [('attn.q_proj', 'attn.k_proj')]
    """
    known = dict.fromkeys(names)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in known):
        for leaves in FUSED_LAYER_NAMES:
            paths = (f"{parent}.{leaf}".lstrip(".") for leaf in leaves)
            present = tuple(path for path in paths if path in known)
            if len(present) > 1:
                yield present


def decided_together(schemes: Mapping[str, QuantizationScheme]) -> dict[str, tuple[str, ...]]:
    """Return for each module those that must be decided on with it: they share a scale when merged.

    A module that shares none stands alone.
    """
    units: dict[str, tuple[str, ...]] = {name: (name,) for name in schemes}
    for group in fused_groups(schemes):
        args = schemes[group[0]].weights
        if args is not None and args.strategy in _ONE_SCALE:
            units.update(dict.fromkeys(group, group))
    return units


def fuse_weight_observers(model: torch.nn.Module) -> None:
    """Link the weight observers of each fused group in `model`.

    A projection that is absent or None is passed over. A group in which some layers are quantized
    and others are not, or not alike, is an error: no server can load it fused.
    """
    from steelyard.observers.base import Observer

    modules = dict(model.named_modules())
    for group in fused_groups(modules):
        found = {n: getattr(modules[n], "weight_observer", None) for n in group}
        observers = {n: o for n, o in found.items() if isinstance(o, Observer)}
        missing = [n for n in group if n not in observers]
        if observers and missing:
            raise FusionError(
                f"{', '.join(observers)} will be quantized but {', '.join(missing)} will not, and "
                "the server fuses them into one layer: target them all, or ignore them all"
            )
        for name, observer in observers.items():
            observer.module_name = observer.module_name or name
        Observer.fuse(observers.values())


def disagreement(first: QuantizationArgs, second: QuantizationArgs) -> str | None:
    """Return the format fields in which two args differ, or None where they agree.

    How a scale is found (`observer`, `observer_kwargs`, `actorder`) may differ; what is stored
    may not.
    """
    differing = [
        f"{field} {getattr(first, field)} and {getattr(second, field)}"
        for field in _FORMAT_FIELDS
        if getattr(first, field) != getattr(second, field)
    ]
    return "; ".join(differing) or None
