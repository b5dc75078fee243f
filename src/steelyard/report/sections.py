"""The parts of a report: what stands in its JSON, field by field.

An error is squared and relative: that of the stored weight, over the sum of squares of the weight.
Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

__all__ = [
    "ComparisonRow",
    "Evaluation",
    "LeftOut",
    "ModuleReport",
    "ScaleFigures",
    "SchemeUse",
    "Summary",
    "WeightFigures",
    "decibels",
]


def decibels(error: float | None) -> float | None:
    """Return the ratio of signal to noise; None for no error, whose ratio is infinite.

    >>> decibels(0.01)
    20.0
    """
    return None if not error else round(-10 * math.log10(error), 4)


def _in_json(value: Any) -> Any:
    """Return a value that JSON can hold: infinities and NaN become text."""
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
    """One way in which modules are quantized."""

    label: str
    """In short, such as W4A16."""
    format: str
    """As in the checkpoint's config.json."""
    weights: str | None = None
    """Type, strategy and observer, in words."""
    inputs: str | None = None
    outputs: str | None = None
    modules: int


class Summary(_Section):
    """A run as a whole."""

    model: str
    schemes: list[SchemeUse]
    quantized: int
    """Modules."""
    left: int
    """Weights that stay as they are."""
    weights: int
    """Numbers in the weights that are quantized."""
    source_bytes: int
    output_bytes: int
    bits_per_weight: float | None
    """Over the weights that are quantized, with all that is stored for them."""
    bits_per_weight_overall: float | None
    """Over the whole checkpoint."""
    median_snr: float | None
    """In decibels, over modules."""
    worst_snr: float | None
    worst_module: str | None
    tokens: int
    """The most that any module saw."""
    seconds: float
    peak_memory: int | None
    """Bytes that the process held at most, libraries and all."""
    created: str
    """When the run ended, in UTC."""
    versions: dict[str, str]


class WeightFigures(_Section):
    """A sample of the weights, before and after, in equal bins."""

    low: float
    high: float
    before: list[int]
    after: list[int]


class ScaleFigures(_Section):
    """The scales as they act; `low` and `high` are decimal logarithms, the ends of the bins."""

    count: int
    negative: int
    min: float
    median: float
    max: float
    low: float
    high: float
    counts: list[int]


class ModuleReport(_Section):
    """One module that is quantized."""

    name: str
    kind: str
    """What it is in each layer, such as self_attn.q_proj; experts share one kind."""
    depth: int | None
    """The number of its layer, None outside of the layers."""
    expert: int | None
    shape: list[int] | None
    """None for attention, of which only the states are quantized."""
    scheme: str
    observer: str | None
    bytes_before: int | None
    bytes_after: int | None
    error: float | None
    snr: float | None
    """In decibels; None where there is no error."""
    tokens: int
    sampled: int | None = None
    """How many weights the share and the histograms are taken from."""
    clipped: float | None = None
    """Share of the weights beyond what their scale can hold by more than half a step."""
    weight: WeightFigures | None = None
    scale: ScaleFigures | None = None
    activations: dict[str, list[float]] = Field(default_factory=dict)
    """Smallest and largest of each static scale of what flows in, out, or into the cache."""
    details: dict[str, JsonValue] = Field(default_factory=dict)
    """What the algorithm tells beyond that."""


class LeftOut(_Section):
    """A weight that stays as it is."""

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
    """Over the weights that are quantized, with all that is stored for them."""
    error: float | None = None
    """Over all weights."""
    snr: float | None = None
    """In decibels; the page computes it where only the error is given."""
    layers: list[float | None] = Field(default_factory=list)
    """The error of each layer, by depth."""
    seconds: float | None = None
    evaluation: Evaluation = Field(default_factory=dict)
