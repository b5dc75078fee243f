"""A second source of the same model, which can be changed apart from the first."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from steelyard.errors import PipelineError
from steelyard.model.source import Source

__all__ = ["second_source"]


def second_source(source: Source, quantized: Collection[str], trust_remote_code: bool) -> Source:
    """Open the files of a source again, or copy the modules of a loaded one but not its weights.

    quantized: names of modules; stacks of experts without one stay stacked
    """
    if source.shards is not None:
        again = Source.open(source.shards.folder, trust_remote_code=trust_remote_code)
    else:
        model = source.model
        if any(type(each._parameters) is not dict for each in model.modules()):
            raise PipelineError("the weights of the module are offloaded; pass its folder")
        shared: dict[int, Any] = {id(p): p for p in model.parameters()}
        shared |= {id(buffer): buffer for buffer in model.buffers()}
        again = Source(copy.deepcopy(model, shared), None, dict(source.keys))
    again.place(source.placement)
    again.restack(quantized)
    return again
