"""The sections of a report, and the fields of its JSON.

Errors are relative squared errors: the sum of squared errors of the stored weight, over the sum of
squares of the weight; an output error likewise, of what flows out of a module. Sizes are in bytes,
times in seconds.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

__all__ = [
    "CheckpointRow",
    "ComparisonRow",
    "Evaluation",
    "ModuleReport",
    "ScaleFigures",
    "SchemeUse",
    "SkippedWeight",
    "Summary",
    "WeightFigures",
    "decibels",
]


def decibels(error: float | None) -> float | None:
    """Return the signal-to-noise ratio; None for no error, where it is infinite.

    >>> decibels(0.01)
    20.0
    """
    return None if not error else round(-10 * math.log10(error), 4)


def _in_json(value: Any) -> Any:
    """Replace infinities and NaN, which JSON cannot hold, by text."""
    if isinstance(value, dict):
        return {key: _in_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


Evaluation = Annotated[dict[str, JsonValue], BeforeValidator(_in_json)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SchemeUse(_Section):
    """One scheme, and the number of modules that use it."""

    label: str
    """Shorthand, such as W4A16."""
    format: str
    """The format in the checkpoint's config.json."""
    weights: str | None = None
    """Type, strategy and observer."""
    inputs: str | None = None
    outputs: str | None = None
    modules: int


class Summary(_Section):
    """Totals of a run."""

    model: str
    schemes: list[SchemeUse]
    quantized: int
    """Number of quantized modules."""
    left: int
    """Number of weights that are not quantized."""
    weights: int
    """Number of elements in the quantized weights."""
    source_bytes: int
    output_bytes: int
    bits_per_weight: float | None
    """Over the quantized weights, including scales and zero points."""
    bits_per_weight_overall: float | None
    """Over the whole checkpoint."""
    median_snr: float | None
    """In decibels, over modules."""
    worst_snr: float | None
    worst_module: str | None
    median_output_snr: float | None = None
    """Of the outputs of modules, in decibels; None if they are not known."""
    worst_output_snr: float | None = None
    worst_output_module: str | None = None
    outputs_on: str | None = None
    """The data that output errors are for: calibration, or held-out."""
    tokens: int
    """Calibration tokens of the module that observed the most."""
    seconds: float
    peak_memory: int | None
    """Peak memory of the whole process."""
    created: str
    """End of the run, in UTC."""
    versions: dict[str, str]


class WeightFigures(_Section):
    """Histograms of a sample of the weights, before and after, with equal bins."""

    low: float
    high: float
    before: list[int]
    after: list[int]


class ScaleFigures(_Section):
    """Histogram of effective scales; `low` and `high` are log10 of the ends of the bins."""

    count: int
    negative: int
    min: float
    median: float
    max: float
    low: float
    high: float
    counts: list[int]


class ModuleReport(_Section):
    """One quantized module."""

    name: str
    kind: str
    """Name within the layer, such as self_attn.q_proj; experts share one kind."""
    depth: int | None
    """Index of the layer; None outside the layers."""
    expert: int | None
    shape: list[int] | None
    """None for attention modules, where only states are quantized."""
    scheme: str
    observer: str | None
    bytes_before: int | None
    bytes_after: int | None
    error: float | None
    snr: float | None
    """In decibels; None if there is no error."""
    output_error: float | None = None
    """Squared error of its output with the stored weight, over the square of the output."""
    output_snr: float | None = None
    """The same in decibels."""
    tokens: int
    sampled: int | None = None
    """Number of weights sampled for `clipped` and the histograms."""
    clipped: float | None = None
    """Fraction of weights outside the range of their scale by more than half a step."""
    weight: WeightFigures | None = None
    scale: ScaleFigures | None = None
    activations: dict[str, list[float]] = Field(default_factory=dict)
    """Smallest and largest value of each static activation or cache scale."""
    details: dict[str, JsonValue] = Field(default_factory=dict)
    """Further figures of the algorithm."""


class SkippedWeight(_Section):
    """A weight that is not quantized."""

    name: str
    shape: list[int]
    bytes: int
    reason: str


class ComparisonRow(_Section):
    """One of several ways to quantize the same model."""

    scheme: str
    observer: str | None = None
    bytes: int | None = None
    bits_per_weight: float | None = None
    """Over the quantized weights, including scales and zero points."""
    error: float | None = None
    """Over all weights."""
    snr: float | None = None
    """In decibels; the page computes it if only the error is given."""
    layers: list[float | None] = Field(default_factory=list)
    """Error of each layer."""
    seconds: float | None = None
    evaluation: Evaluation = Field(default_factory=dict)


class CheckpointRow(_Section):
    """One of several checkpoints of the same model, scored on the same tokens."""

    name: str
    schemes: str
    """Such as W4A16, or 14 W4A16, 4 W8A16."""
    bytes: int
    bits_per_weight: float | None = None
    """Over the quantized weights, including scales and zero points."""
    kl_divergence: float
    kl_error: float | None = None
    """Standard error of kl_divergence."""
    kl_p99: float
    perplexity_change: float | None = None
    top1_agreement: float
    verdict: str
    behind: float
    """KL divergence more than that of the closest to the original."""
    within_noise: bool
    """Whether the difference is within two standard errors."""
    smallest: bool
    """No other is both smaller and closer to the original."""
    link: str | None = None
    """Address of its own report, relative to this page."""
