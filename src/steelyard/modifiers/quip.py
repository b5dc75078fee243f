"""Options of QuIP, which rotates the inputs or outputs of Linear layers.

[QuIPModifier(targets=["Linear"], ignore=["lm_head"]), QuantizationModifier(scheme="W4A16")]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from steelyard.formats.served_rotation import ServedRotation
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.spinquant import RotatingModifier, TransformType
from steelyard.modifiers.targets import Target

__all__ = ["QuIPModifier"]


@Modifier.register("QuIPModifier")
class QuIPModifier(RotatingModifier):
    """Rotate inputs (v) or outputs (u) of Linear layers; a server rotates them back."""

    algorithm: ClassVar[str] = "quip"

    rotations: list[Literal["v", "u"]] = Field(
        default=["v"], min_length=1, description="v: inputs; u: outputs"
    )
    transform_type: TransformType = Field(
        default="random-hadamard", description="hadamard: for sizes that are powers of two"
    )
    ignore: list[Target] = Field(default=["lm_head"])

    @field_validator("rotations", mode="before")
    @classmethod
    def _in_either_case(cls, value: Any) -> Any:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, (list, tuple)):
            return value
        return list(dict.fromkeys(str(each).lower() for each in given))

    @field_validator("randomize")
    @classmethod
    def _is_shared(cls, value: bool) -> bool:
        if value:
            raise ValueError("all layers share a matrix when they are served: set it to false")
        return value

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, data: Any) -> Any:
        """Take the options from the `transform_config` that llm-compressor writes into recipes."""
        config = data.get("transform_config") if isinstance(data, Mapping) else None
        groups = config.get("config_groups") if isinstance(config, Mapping) else None
        if not isinstance(groups, Mapping):
            return data
        types = {str(scheme.get("type")) for scheme in groups.values()}
        if len(types) != 1 or not groups.keys() <= {"u", "v"} or not groups:
            raise ValueError(
                "transform_config must have the groups u and v of one type, as llm-compressor "
                f"writes them, but has {', '.join(map(str, groups))} of {' and '.join(types)}"
            )
        scheme = next(iter(groups.values()))
        named = {"rotations": list(groups), "transform_type": types.pop()}
        named["transform_block_size"] = scheme.get("head_dim")
        for args in scheme.get("apply") or ():
            named |= {key: args[key] for key in ("targets", "ignore") if args.get(key) is not None}
        return {**{k: v for k, v in data.items() if k != "transform_config"}, **named}

    def served_rotations(self) -> list[ServedRotation]:
        sides = {"v": "input", "u": "output"}
        return [self.served(n, sides[n], self.targets, self.ignore) for n in self.rotations]
