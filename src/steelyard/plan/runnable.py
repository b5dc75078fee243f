"""Chooses how calibration data runs through a model: layer by layer, or as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steelyard.errors import PipelineError
from steelyard.model.module_names import grouped
from steelyard.model.repeated_calls import repeated_layer
from steelyard.model.stacks import Layer, model_layers, refusal
from steelyard.words import count

__all__ = ["Route", "route_of"]


@dataclass(frozen=True)
class Route:
    """How calibration data runs through a model.

    whole: whether the model runs as a whole, and is in memory as a whole
    text:  for the plan
    """

    whole: bool
    text: str


def route_of(model: Any, pipeline: str) -> Route:
    """Return how batches will run through a model.

    Raises a PipelineError if `pipeline="sequential"` and the model cannot run layer by layer.
    """
    if pipeline == "basic":
        return Route(True, 'the model as a whole, as pipeline="basic" asks')
    try:
        layers = model_layers(model)
        if (again := repeated_layer(model, layers)) is not None:
            raise refusal(model, f"calls {again} more than once")
        return Route(False, _stacks(layers))
    except PipelineError as error:
        if pipeline == "sequential":
            raise
        reason = str(error).partition(";")[0]
        return Route(True, f"the model as a whole, with all of it in memory: {reason}")


def _stacks(layers: list[Layer]) -> str:
    stacks = grouped(layers, lambda layer: layer.name, lambda layer: layer.name.rpartition(".")[0])
    parts = [f"{name} ({count(len(members), 'layer')})" for name, members in stacks]
    return f"one layer at a time: {', then '.join(parts)}"
