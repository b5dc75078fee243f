"""Applies the rotations of a server in the forward pass of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from compressed_tensors.utils.match import is_match
from torch.nn import Linear, Module
from torch.utils.weak import WeakTensorKeyDictionary

from steelyard.formats.served_rotation import ServedRotation
from steelyard.kernels.rotation import Rotation, make_rotation

__all__ = ["attach_rotations", "made_rotation", "rotated_modules", "stored_matrices"]

RotationOf = Callable[[ServedRotation, int], Rotation]
"""Returns the rotation of an order."""


def made_rotation(rotation: ServedRotation, size: int) -> Rotation:
    """Return the rotation that a run stores."""
    return make_rotation(rotation.kind, size, rotation.group)


def rotated_modules(model: Any, rotation: ServedRotation) -> Iterator[tuple[str, Any]]:
    """Yield the Linear layers that a rotation belongs to, as a server finds them."""
    others = getattr(model, "other_names", {})
    for name, module in model.named_modules():
        names = dict.fromkeys([name, others.get(name, name)])
        if isinstance(module, Linear) and any(
            is_match(each, module, list(rotation.targets), list(rotation.ignore)) for each in names
        ):
            yield name, module


def attach_rotations(model: Any, rotation: ServedRotation, rotation_of: RotationOf) -> None:
    """Register hooks that rotate inputs or outputs; hooks that come later see rotated values."""
    hooks: dict[int, Any] = {}  # one for each size, so that modules share a rotated input
    for _, module in rotated_modules(model, rotation):
        size = rotation.size(tuple(module.weight.shape))
        if size not in hooks:
            turned = rotation_of(rotation, size)
            hooks[size] = _on_input(turned) if rotation.side == "input" else _on_output(turned)
        if rotation.side == "input":
            module.register_forward_pre_hook(hooks[size])
        else:
            module.register_forward_hook(hooks[size])


def _on_input(rotation: Rotation) -> Callable[..., Any]:
    # modules that are called with one tensor get one rotated tensor, even if other batches run
    # between their calls
    made: Any = WeakTensorKeyDictionary()

    def rotated(_: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        found = made.get(x)
        if found is None:
            found = made[x] = rotation.rotate(x).to(x.dtype)
        return (found, *args[1:])

    return rotated


def _on_output(rotation: Rotation) -> Callable[..., Any]:
    inverse = rotation.inverse()

    def rotated(_: Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return inverse.rotate(output).to(output.dtype)

    return rotated


def stored_matrices(
    model: Any, rotations: list[ServedRotation], key: Callable[[str], str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the matrices to store, +1 and -1, by name.

    key: maps a module to its name in the files
    """
    found: dict[str, torch.Tensor] = {}
    for rotation in rotations:
        sizes: set[int] = set()
        for name, module in rotated_modules(model, rotation):
            size = rotation.size(tuple(module.weight.shape))
            if size not in sizes:
                sizes.add(size)
                matrix = made_rotation(rotation, size).matrix() * size**0.5
                found[f"{key(name)}.{rotation.leaf}.weight"] = matrix.round().to(dtype)
    return found
