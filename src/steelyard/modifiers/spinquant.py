"""Options of SpinQuant, which rotates hidden states so that no channel is much larger than others.

[SpinQuantModifier(rotations=["R1", "R2"]), QuantizationModifier(scheme="W4A16")]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from compressed_tensors.utils import TorchDtype
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from steelyard.formats.served_rotation import ServedRotation
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.targets import Target

__all__ = ["NormMapping", "RotatingModifier", "SpinQuantMapping", "SpinQuantModifier"]

RotationName = Literal["R1", "R2", "R3", "R4"]
TransformType = Literal["hadamard", "random-hadamard", "random-matrix"]


_DOWN = "re:.*down_proj$"


class _Mapping(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("mlp_in", "mlp_out", "linears", mode="before", check_fields=False)
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class SpinQuantMapping(_Mapping):
    """Patterns of the modules that write to the residual stream, and of those that read it."""

    embedding: Target
    attn: Target | None = None
    attn_q: Target
    attn_k: Target
    attn_v: Target
    attn_o: Target
    attn_head_dim: int | None = None
    mlp_in: list[Target]
    mlp_out: list[Target]
    lm_head: Target


class NormMapping(_Mapping):
    """A norm, and the Linear layers that read its output."""

    norm: Target
    linears: list[Target]


class RotatingModifier(Modifier):
    """The base of modifiers that rotate; not registered."""

    transform_type: TransformType = Field(
        default="hadamard",
        description="random-hadamard: with random signs; random-matrix: a random orthogonal matrix",
    )
    randomize: bool = Field(
        default=False, description="another random rotation for each layer, where that is possible"
    )
    learnable: bool = Field(default=False, description="not supported: rotations are not trained")
    precision: TorchDtype = Field(
        default=torch.float64,
        description="of rotations while the model is served; those in weights are made in fp64",
    )
    transform_block_size: int | None = Field(
        default=None, ge=2, description="rotate in blocks of so many channels, which must divide"
    )
    transform_config: None = Field(
        default=None,
        description="as llm-compressor writes it into recipes; the other options follow from it",
    )

    @field_validator("learnable")
    @classmethod
    def _is_not_trained(cls, value: bool) -> bool:
        if value:
            raise ValueError("rotations are not trained here: set it to false, or omit it")
        return value

    def served(
        self, group: str, side: str, targets: Sequence[str], ignore: Sequence[str]
    ) -> ServedRotation:
        """Return a rotation of inputs or outputs that a server applies."""
        return ServedRotation(
            group,
            self.transform_type,
            side,
            tuple(targets),
            tuple(ignore),
            self.transform_block_size,
            str(self.precision),
        )

    @model_validator(mode="after")
    def _has_something_to_randomize(self) -> Any:
        if self.randomize and self.transform_type == "hadamard":
            raise ValueError(
                "randomize needs a random rotation: set transform_type to random-hadamard or "
                "random-matrix"
            )
        return self


@Modifier.register("SpinQuantModifier")
class SpinQuantModifier(RotatingModifier):
    """Rotate the residual stream (R1) and the heads of values (R2), folded into the weights.

    R4 rotates the input of down_proj, and a server rotates that input while the model runs.
    """

    algorithm: ClassVar[str] = "spinquant"

    rotations: list[RotationName] = Field(
        default=["R1", "R2"],
        min_length=1,
        description="R1: the residual stream; R2: the values of attention, by head; R4: the input "
        "of down_proj, while the model is served",
    )
    held_out_check: bool = Field(
        default=True,
        description="with calibration data, measure the KL divergence of the rounded model with "
        "all rotations, without R1, and with none; keep the best",
    )
    mappings: SpinQuantMapping | None = Field(
        default=None, description="names of the modules; without it they are found"
    )
    norm_mappings: list[NormMapping] | None = Field(
        default=None, description="norms and their readers; without it they are found"
    )

    @field_validator("rotations", mode="before")
    @classmethod
    def _in_either_case(cls, value: Any) -> Any:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, (list, tuple)):
            return value
        return [str(getattr(each, "value", each)).upper() for each in given]

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, data: Any) -> Any:
        """Take the options from the `transform_config` that llm-compressor writes into recipes."""
        config = data.get("transform_config") if isinstance(data, Mapping) else None
        groups = config.get("config_groups") if isinstance(config, Mapping) else None
        if not isinstance(groups, Mapping):
            return data
        types = {str(scheme.get("type")) for scheme in groups.values()}
        if len(types) != 1 or not groups.keys() <= {"R1", "R2", "R3", "R4"}:
            raise ValueError(
                "transform_config must have the groups R1 and R2 of one type, as llm-compressor "
                f"writes them, but has {', '.join(map(str, groups))} of {' and '.join(types)}"
            )
        given = {key: value for key, value in data.items() if key != "transform_config"}
        sizes = [groups[name].get("head_dim") for name in ("R1", "R4") if name in groups]
        size = next(iter(sizes), None)
        named = {"rotations": list(groups), "transform_type": types.pop()}
        return {**given, **named, "transform_block_size": size}

    @field_validator("rotations")
    @classmethod
    def _can_be_served(cls, value: list[str]) -> list[str]:
        if "R3" in value:
            raise ValueError(
                "R3 rotates queries and keys after their position embedding, and vLLM has no such "
                "rotation: remove R3"
            )
        return list(dict.fromkeys(value))

    @model_validator(mode="after")
    def _rotates_all(self) -> SpinQuantModifier:
        if given := {"targets", "ignore"} & self.model_fields_set:
            raise ValueError(
                f"{min(given)} has no effect, since a rotation of the residual stream needs all "
                "modules that read it: remove it"
            )
        return self

    @property
    def unties_heads(self) -> bool:
        """R1 folds the gain of the last norm into the head, which the embedding must not have."""
        return "R1" in self.rotations

    def served_rotations(self) -> list[ServedRotation]:
        if "R4" not in self.rotations:
            return []
        targets = [_DOWN] if self.mappings is None else self.mappings.mlp_out
        return [self.served("R4", "input", targets, [])]

    def candidates(self) -> dict[str, list[Modifier]]:
        if not self.held_out_check:
            return {}
        found: dict[str, list[Modifier]] = {}
        for rotations in (self.rotations, [each for each in self.rotations if each != "R1"]):
            if rotations:
                given = {"rotations": rotations, "held_out_check": False}
                found[" and ".join(rotations)] = [self.model_copy(update=given)]
        return {**found, "no rotation": []}

    def doubts(self, plan: Any, model: Any) -> Iterator[str]:
        if not self.held_out_check:  # measured, or not wanted
            return
        inputs = [each.scheme.input_activations for each in plan.quantized]
        nearest = [p for p in plan.quantized if plan.algorithms[p.modifier] == "nearest"]
        bits = [p.scheme.weights.num_bits for p in nearest if p.scheme.weights is not None]
        if "R1" not in self.rotations:
            return
        if any(each is not None and each.group_size for each in inputs):
            yield (
                "SpinQuantModifier spreads large inputs over all channels, so the scale of every "
                "group of inputs has to hold them: SmolLM2 in NVFP4 loses twice as much with R1 as "
                "without. Pass calibration data to measure it, or leave R1 out; TransformModifier "
                "balances such inputs"
            )
        elif any(each < 8 for each in bits):
            yield (
                "SpinQuantModifier spreads large inputs over all channels, so no column of a "
                "weight stands out for its importance: rounded to nearest, SmolLM2 loses 2.5 times "
                "as much in W4A16 with R1 as without. Pass calibration data to measure it, round "
                "with GPTQModifier, or leave R1 out"
            )

    def patterns(self) -> list[str]:
        return [*super().patterns(), *self._mapped()]

    def _mapped(self) -> Iterator[str]:
        for each in [self.mappings, *(self.norm_mappings or ())]:
            for value in [] if each is None else each.model_dump().values():
                if isinstance(value, str):
                    yield value
                elif isinstance(value, list):
                    yield from value
