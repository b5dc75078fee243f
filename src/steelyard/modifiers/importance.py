"""Options for gathering importance, E[x^2] of every input channel, for weight observers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from compressed_tensors.utils.match import is_match
from pydantic import Field, field_validator
from torch.nn import Module

from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.targets import Target
from steelyard.observers import Observer
from steelyard.observers.importance_base import ImportanceObserver

__all__ = ["IMatrixGatherer"]

_IDLE = (
    "IMatrixGatherer has no effect, since no weight that it targets has an observer that uses "
    "importance: choose optimal or imatrix_mse as the weight_observer, or remove it"
)


@Modifier.register("IMatrixGatherer")
class IMatrixGatherer(Modifier):
    """Run calibration data, so that `optimal` and `imatrix_mse` can weight columns by importance.

    The observers gather importance themselves, in the pass that runs anyway; this modifier requests
    that pass if the scheme alone needs no data. With `load_from` no data is needed.
    """

    algorithm: ClassVar[str] = "importance"

    ignore: list[Target] = Field(default_factory=lambda: ["lm_head"])
    load_from: list[str] = Field(
        default_factory=list,
        description="importance files to read and add up: Steelyard's own, or llama.cpp's GGUF",
    )
    save_to: str | None = Field(default=None, description="file to save this run's importance to")

    @field_validator("load_from", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        return [str(value)] if isinstance(value, (str, Path)) else value

    def checks(self, plan: Any, model: Any) -> Iterator[str]:
        if self.save_to is not None and not self._feeds_an_observer(plan, model):
            yield f"nothing would be saved to {self.save_to}: {_IDLE}"

    def doubts(self, plan: Any, model: Any) -> Iterator[str]:
        if self.save_to is None and not self._feeds_an_observer(plan, model):
            yield _IDLE

    def covers(self, name: str, module: Module) -> bool:
        """Whether the observer of a module gathers importance."""
        return bool(is_match(name, module, self.targets, self.ignore))

    def _feeds_an_observer(self, plan: Any, model: Any) -> bool:
        modules = dict(model.named_modules())
        for planned in plan.quantized:
            weights = planned.scheme.weights
            if weights is None or weights.observer is None:
                continue
            observer = Observer.get_value_from_registry(weights.observer)
            covered = self.covers(planned.name, modules[planned.name])
            if issubclass(observer, ImportanceObserver) and covered:
                return True
        return False
