"""The result of a run, besides the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.algorithms import ModuleResult
from steelyard.engine.summary import summary
from steelyard.foreign import printable
from steelyard.plan.plan import Plan
from steelyard.recipes import Recipe
from steelyard.words import count

__all__ = ["ModuleResults", "Result"]


class ModuleResults(dict[str, ModuleResult]):
    """Results by the name of the module; called, it yields modules as `model.modules()` does."""

    model: Any = None

    def __call__(self) -> Iterator[Any]:
        modules: Iterator[Any] = self.model.modules()
        return modules


@dataclass(repr=False)
class Result:
    """Result of a run; prints as a table of errors with sizes, warnings and notes.

    llm-compressor's `oneshot` returns the model. So a result has the attributes of the loaded
    module that was passed, besides its own: `result.generate(...)`, `result.save_pretrained(...)`,
    `result(input_ids)`.

    model:    the loaded module that was passed, now quantized; None if the source was a folder
    source:   name of the model
    warnings: the notes that call for attention
    changed:  tensors of the source that the run changed, before or without quantizing them
    """

    plan: Plan
    recipe: Recipe
    modules: ModuleResults = field(default_factory=lambda: ModuleResults())
    output_dir: Path | None = None
    model: Any = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    source: str = ""
    warnings: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules.model = self.model

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, for scripts that use the result as the model."""
        model = self.__dict__.get("model")
        if model is not None and not name.startswith("__"):
            return getattr(model, name)
        raise AttributeError(_missing(name, self.__dict__.get("output_dir")))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.model is None:
            raise TypeError(_missing("__call__", self.output_dir))
        return self.model(*args, **kwargs)

    def __str__(self) -> str:
        planned_only = not self.modules and not self.seconds
        return str(self.plan) if planned_only else summary(self)

    def __repr__(self) -> str:
        where = f", output_dir={str(self.output_dir)!r}" if self.output_dir is not None else ""
        modules = count(len(self.modules), "module")
        return f"<Result: {modules} of {printable(self.source)!r} quantized{where}>"


def _missing(name: str, folder: Path | None) -> str:
    text = f"a Result has no attribute {name!r}"
    if folder is None or (name.startswith("__") and name != "__call__"):
        return text
    return (
        f"{text}: the model was quantized file by file and is not in memory; load it with "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    )
