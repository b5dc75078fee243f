"""Rotations that a server applies, as compressed-tensors stores them.

    "transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [
        {"location": "input", "targets": [...]},
        {"location": "weight_input", "inverse": true, "targets": [...]}]}}}

The weights are stored rotated. The matrix is stored as +1 and -1, once for each size, beside the
first module that it belongs to: `model.layers.0.mlp.down_proj.R4_input.weight`. A server divides it
by the root of its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ServedRotation", "rotation_modules", "served_rotations", "transform_config"]

SERVED_TYPES = ("hadamard", "random-hadamard")
"""vLLM divides every matrix by the root of its size, compressed-tensors only these."""


@dataclass(frozen=True)
class ServedRotation:
    """A rotation of the inputs or the outputs of some Linear layers.

    group: name in the transform_config
    kind:  hadamard (Sylvester's matrix) | random-hadamard
    side:  input (x -> x Q) | output (y -> y Q^T)
    block: rotate in blocks of so many channels; None for all at once
    """

    group: str
    kind: str
    side: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...] = ()
    block: int | None = None
    precision: str = "torch.float64"

    @property
    def leaf(self) -> str:
        """Name of the module that holds the matrix, within the module that is rotated."""
        return f"{self.group}_{self.side}"

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the order of the matrix for a weight of this shape, (out, in)."""
        return self.block or shape[1 if self.side == "input" else 0]


def transform_config(rotations: list[ServedRotation]) -> dict[str, Any]:
    """Return the value of "transform_config" in config.json, in JSON's types."""
    if not rotations:
        return {}
    return {
        "config_groups": {
            rotation.group: {
                "type": rotation.kind,
                "apply": [
                    _applied(rotation, rotation.side, rotation.side == "output"),
                    _applied(rotation, f"weight_{rotation.side}", rotation.side == "input"),
                ],
                "randomize": False,
                "requires_grad": False,
                "head_dim": rotation.block,
                "precision": rotation.precision,
            }
            for rotation in rotations
        }
    }


def _applied(rotation: ServedRotation, location: str, inverse: bool) -> dict[str, Any]:
    return {
        "targets": list(rotation.targets),
        "location": location,
        "inverse": inverse,
        "ignore": list(rotation.ignore),
    }


def served_rotations(config: Mapping[str, Any]) -> Iterator[ServedRotation]:
    """Yield the rotations of a transform_config; raise a ValueError for those not known here."""
    for group, scheme in (config.get("config_groups") or {}).items():
        kind, block = scheme.get("type"), scheme.get("head_dim")
        if not isinstance(kind, str):
            raise ValueError(f"{group} has no type")
        for args in scheme.get("apply") or ():
            location, inverse = args.get("location"), bool(args.get("inverse"))
            if location in ("weight_input", "weight_output"):
                continue
            known = location in ("input", "output") and inverse == (location == "output")
            if not known or kind not in SERVED_TYPES or scheme.get("randomize"):
                raise ValueError(f"{group}: {kind} at {location}")
            targets, ignore = (args.get(key) or [] for key in ("targets", "ignore"))
            yield ServedRotation(group, kind, location, tuple(targets), tuple(ignore), block)


def rotation_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the endings of modules that hold matrices, for any transform_config."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    if not isinstance(groups, Mapping):
        return ()
    return tuple(f".{group}_{side}" for group in groups for side in ("input", "output"))
