"""Links the weight observers of layers that the server fuses; see `steelyard.fusion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from steelyard.errors import FusionError
from steelyard.fusion import fused_groups

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationArgs

    from steelyard.observers.base import Observer

__all__ = ["disagreement", "fuse", "fuse_weight_observers"]

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

    A projection that is absent or None is skipped. A group in which only some layers are quantized,
    or not all with one scheme, is an error: no server can load it fused.
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


def fuse(observers: Iterable[Observer]) -> None:
    """Link observers of layers that the server fuses; reject layers that are stored differently."""
    linked = list(observers)
    for other in linked[1:]:
        differing = disagreement(linked[0].args, other.args)
        if differing:
            raise FusionError(
                f"{linked[0].label} and {other.label} are fused by the server but quantized "
                f"differently: {differing}; give them one scheme, or ignore them all"
            )
    # fusion is transitive
    group = {o for member in linked for o in (member, *member._fused_observers)}
    for observer in group:
        observer._fused_observers = group - {observer}


def disagreement(first: QuantizationArgs, second: QuantizationArgs) -> str | None:
    """Return the format fields in which two args differ, or None where they agree.

    Fields that say how a scale is found (`observer`, `observer_kwargs`, `actorder`) may differ.
    """
    differing = [
        f"{field} {getattr(first, field)} and {getattr(second, field)}"
        for field in _FORMAT_FIELDS
        if getattr(first, field) != getattr(second, field)
    ]
    return "; ".join(differing) or None
