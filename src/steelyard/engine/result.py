"""The result of a run, besides the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.algorithms import ModuleResult
from steelyard.engine.summary import summary
from steelyard.foreign import printable
from steelyard.plan.plan import Plan
from steelyard.recipes import Recipe
from steelyard.words import count

__all__ = ["Result"]


@dataclass(repr=False)
class Result:
    """Result of a run; prints as a table of errors with sizes, warnings and notes.

    model:    the loaded module that was passed, now quantized; None if the source was a folder
    source:   name of the model
    warnings: the notes that call for attention
    changed:  tensors of the source that the run changed, before or without quantizing them
    """

    plan: Plan
    recipe: Recipe
    modules: dict[str, ModuleResult] = field(default_factory=dict)
    output_dir: Path | None = None
    model: Any = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    source: str = ""
    warnings: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        planned_only = not self.modules and not self.seconds
        return str(self.plan) if planned_only else summary(self)

    def __repr__(self) -> str:
        where = f", output_dir={str(self.output_dir)!r}" if self.output_dir is not None else ""
        modules = count(len(self.modules), "module")
        return f"<Result: {modules} of {printable(self.source)!r} quantized{where}>"
