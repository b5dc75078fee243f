"""Options of GPTQ, which rounds weights so that the output of each layer changes least.

    GPTQModifier(scheme="W4A16", ignore=["lm_head"])

The scales come from an observer, as for `QuantizationModifier`; calibration data then decides which
way each weight is rounded. Each module gets the output of the quantized modules before it, also
those of its own layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

from compressed_tensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.utils.match import is_match
from pydantic import Field, field_validator, model_validator

from steelyard.errors import PipelineError
from steelyard.formats import stored_as
from steelyard.formats.tensor_names import GROUP_INDEX
from steelyard.model.stacks import decoder_layers
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.nearest import QuantizationModifier
from steelyard.modifiers.observer_choice import with_default
from steelyard.modifiers.schemes import args_problem
from steelyard.modifiers.targets import Target

__all__ = ["GPTQModifier"]

REGROUPING = (ActivationOrdering.GROUP, ActivationOrdering.DYNAMIC)


@Modifier.register("GPTQModifier")
class GPTQModifier(QuantizationModifier):
    """Quantize weights with GPTQ; activations and the KV cache as `QuantizationModifier` does.

    Set one of `scheme`, `config_groups` and `weights`.
    """

    algorithm: ClassVar[str] = "gptq"
    _ways: ClassVar[tuple[str, ...]] = ("scheme", "config_groups", "weights")

    weights: QuantizationArgs | None = Field(
        default=None, description="arguments for the weights of all targets, nothing else quantized"
    )
    block_size: int = Field(default=128, ge=1, description="columns between two large products")
    dampening_frac: float | None = Field(
        default=0.01, ge=0, description="added to the diagonal, as a fraction of its mean; at least"
    )
    held_out_dampening: bool = Field(
        default=True,
        description="raise dampening_frac, up to 30 times, as far as held-out batches confirm it; "
        "takes effect with drift_correction",
    )
    actorder: ActivationOrdering | None = Field(
        default=ActivationOrdering.STATIC,
        description="columns with the largest inputs first (static, weight), or in order (null)",
    )
    refinements: int = Field(
        default=2,
        ge=0,
        description="rounds after the solve, each fitting scales to codes and codes to scales; "
        "0 keeps the observer's scales",
    )
    drift_correction: bool = Field(
        default=True,
        description="round to the weight that makes up for what the quantized layers before it "
        "have changed in its inputs, as far as held-out batches confirm it",
    )
    token_weights: bool = Field(
        default=False,
        description="divide the squared error of a token by the mean square of its hidden state, "
        "as the next norm does; not for q, k and v, and not where inputs have fewer than 8 bits",
    )
    offload_hessians: bool = Field(default=False, description="keep Hessians on the CPU")
    sequential_targets: list[Target] | None = Field(
        default=None, description="modules that run one after another; always the decoder layers"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_observer(cls, data: Any) -> Any:
        return with_default(data, "weights", "weight")

    @field_validator("sequential_targets", mode="before")
    @classmethod
    def _one_target_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("weights")
    @classmethod
    def _weights_can_be_stored(cls, value: QuantizationArgs | None) -> QuantizationArgs | None:
        if value is not None and (problem := args_problem(value)):
            raise ValueError(f"num_bits: {problem}")
        return value

    @field_validator("actorder")
    @classmethod
    def _can_be_stored_so(cls, value: ActivationOrdering | None) -> ActivationOrdering | None:
        if value in REGROUPING and not _stores_groups():
            raise ValueError(
                "the installed compressed-tensors cannot store groups of non-adjacent columns; "
                "actorder: static rounds in the same order and keeps the groups"
            )
        return value

    def _refuse_idle_targets(self) -> None:
        if self.weights is None:
            super()._refuse_idle_targets()
        elif self.scheme is not None or self.config_groups is not None:
            raise ValueError("give one of scheme, config_groups and weights")

    def _groups(self) -> dict[str, QuantizationScheme]:
        groups = super()._groups()
        if self.weights is not None:
            groups = {"group_0": QuantizationScheme(targets=self.targets, weights=self.weights)}
        return groups

    @cached_property
    def config(self) -> QuantizationConfig:
        config = super().config
        for scheme in config.config_groups.values():
            if scheme.weights is not None and scheme.weights.strategy in ("group", "tensor_group"):
                scheme.weights.actorder = self.actorder  # other strategies store nothing of it
        return config

    def patterns(self) -> list[str]:
        return [*super().patterns(), *(self.sequential_targets or ())]

    def checks(self, plan: Any, model: Any) -> Iterator[str]:
        """Refuse `sequential_targets` other than the decoder layers."""
        yield from super().checks(plan, model)
        try:
            name, layers = decoder_layers(model)
        except PipelineError:
            return
        for target in self.sequential_targets or ():
            if not is_match(f"{name}.0", layers[0], target):
                yield (
                    f"sequential_targets has {target!r}, but only decoder layers run one after "
                    f"another: use {type(layers[0]).__name__}, or remove it"
                )


def _stores_groups() -> bool:
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    assert scheme.weights is not None
    scheme.weights.actorder = ActivationOrdering.GROUP
    return stored_as(scheme).stores(GROUP_INDEX, scheme)
