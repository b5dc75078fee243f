"""Which layers the server fuses, and linking their weight observers.

vLLM stores q, k and v as one matrix, and gate and up as one. Where the format has a single scale
for that matrix (NVFP4's global scale, a per-tensor FP8 scale), the partners must agree on it
before they are quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard.errors import FusionError

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["FUSED_LAYER_NAMES", "disagreement", "fuse_weight_observers"]

FUSED_LAYER_NAMES: list[tuple[str, ...]] = [
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
]
"""Attribute names of sibling layers that the server merges into one."""

_FORMAT_FIELDS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "scale_dtype",
)


def fuse_weight_observers(model: torch.nn.Module) -> None:
    """Link the weight observers of each fused group in `model`.

    A projection that is absent or None is passed over. A group in which some layers are quantized
    and others are not, or not alike, is an error: no server can load it fused.
    """
    import torch

    from steelyard.observers.base import Observer

    for parent_name, parent in model.named_modules():
        for names in FUSED_LAYER_NAMES:
            layers = {name: getattr(parent, name, None) for name in names}
            present = {k: v for k, v in layers.items() if isinstance(v, torch.nn.Module)}
            paths = {k: f"{parent_name}.{k}".lstrip(".") for k in present}
            observers: dict[str, Observer] = {}
            for key, layer in present.items():
                observer = getattr(layer, "weight_observer", None)
                if isinstance(observer, Observer):
                    observers[key] = observer
            missing = [paths[k] for k in present if k not in observers]
            if observers and missing:
                found = [paths[k] for k in observers]
                raise FusionError(
                    f"{', '.join(found)} will be quantized but {', '.join(missing)} will not, and "
                    "the server fuses them into one layer: target them all, or ignore them all"
                )
            for key, observer in observers.items():
                observer.module_name = observer.module_name or paths[key]
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
