"""Whether calibration data, which are token ids, can run through a model; asked before any work."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from steelyard.errors import PipelineError
from steelyard.model.blocks import decoder_layers
from steelyard.model.forward_errors import WITHOUT_DATA
from steelyard.model.skeleton import encoder_refusal
from steelyard.model.source import Source

__all__ = ["unrunnable"]


def unrunnable(source: Source, pipeline: str) -> Iterator[str]:
    """Yield why the model cannot be calibrated in this way."""
    model, config = source.model, source.config()
    name = type(model).__name__
    if refusal := encoder_refusal(config, name):
        yield refusal
        return
    needed = _needed_inputs(model)
    if needed:
        yield (
            f"{name} needs {', '.join(needed)}, and calibration data holds token ids alone; "
            f"{WITHOUT_DATA}"
        )
        return
    if pipeline != "basic":
        try:
            decoder_layers(model)
        except PipelineError as error:
            yield str(error)


def _needed_inputs(model: Any) -> list[str]:
    """Return what the forward cannot do without, besides token ids."""
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in fixed and p.name != "input_ids"
    ]
    if needed or any(p.kind in fixed or p.name == "input_ids" for p in parameters):
        return needed
    return [str(getattr(model, "main_input_name", "other input"))]
