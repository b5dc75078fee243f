"""Tensors of a model that are computed anew from those of the source, before any other work.

A rewritten tensor depends on its own values, and on vectors of the source such as the gain of a
norm. So it can be computed whenever it is read, by any rank and by a run that resumes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from steelyard.errors import PipelineError

if TYPE_CHECKING:
    from steelyard.model.source import Source

__all__ = ["Rewrites", "rewrite_source"]

Step = Callable[..., torch.Tensor]
"""Takes the tensor in fp64, and the vectors that it was added with; returns it in fp64."""

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Rewrites:
    """Steps for each tensor, by its name in the model, applied in order.

    Everything is in fp64, and rounded once to the type that the tensor is stored in.
    """

    steps: dict[str, list[tuple[Step, tuple[str, ...]]]] = field(default_factory=dict)

    def add(self, name: str, step: Step, *vectors: str) -> None:
        """Add a step for a tensor.

        vectors: names of 1-D tensors, whose values in the source the step gets
        """
        self.steps.setdefault(name, []).append((step, vectors))

    def changes(self, read: Callable[[str], torch.Tensor]) -> dict[str, Change]:
        """Return a function for each tensor, from its value in the source to the new one.

        read: returns a tensor of the source
        """
        named = {v for steps in self.steps.values() for _, vectors in steps for v in vectors}
        values = {name: read(name).to(torch.float64, copy=True) for name in sorted(named)}
        return {
            name: functools.partial(_changed, _with_values(steps, values))
            for name, steps in self.steps.items()
        }


def _with_values(
    steps: list[tuple[Step, tuple[str, ...]]], values: Mapping[str, torch.Tensor]
) -> list[tuple[Step, list[torch.Tensor]]]:
    return [(step, [values[name] for name in names]) for step, names in steps]


def _changed(steps: list[tuple[Step, list[torch.Tensor]]], value: torch.Tensor) -> torch.Tensor:
    wide = value.double()
    for step, vectors in steps:
        wide = step(wide, *(vector.to(wide.device) for vector in vectors))
    return wide.to(value.dtype).contiguous()


def rewrite_source(source: Source, rewrites: Rewrites) -> list[str]:
    """Replace tensors of a source; return their names in its files.

    A tensor in files is computed whenever it is read, one of a loaded module at once.
    """
    files = source.shards
    if files is None:
        found = rewrites.changes(lambda name: source.model.get_parameter(name).data)
        for name, change in found.items():
            path, _, leaf = name.rpartition(".")
            parameters = source.model.get_submodule(path)._parameters
            parameters[leaf] = Parameter(change(parameters[leaf].data), requires_grad=False)
        return [source.key(name) for name in found]
    for name in rewrites.steps:
        if name not in source.keys or source.keys[name] not in files:
            raise PipelineError(
                f"{name} has no tensor of its own in {files.folder}, only a part of one, so it "
                "cannot be replaced there; load the model with transformers and pass the module"
            )
    found = rewrites.changes(lambda name: files.read(source.keys[name]))
    for name, change in found.items():
        files.rewrite(source.keys[name], change)
    return [source.keys[name] for name in found]
