"""Targets that share their weight with another module: a head is untied, an embedding refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from steelyard.model.model_class import tied_modules
from steelyard.model.untying import tied_heads, untying_problem

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan

__all__ = ["TiedHeads", "tied_errors", "untying_notes"]


class TiedHeads:
    """The heads of a model that take over the weight of an embedding."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self.heads = tied_heads(model)

    @cached_property
    def _problem(self) -> str | None:
        return untying_problem(self._model)

    def refusal(self, name: str) -> str | None:
        """Return why a module is not quantized unless a target names it; None if it may be."""
        if name not in self.heads or self._problem is None:
            return None
        head, other = (self._modules.get(n) for n in (name, self.heads[name]))
        if head is None or other is None or head.weight is not other.weight:
            return None  # it is stored, and leaving it as it is would not be what was asked for
        return f"shares its weight with {self.heads[name]}, and {self._problem}"

    def untied(self, plan: Plan) -> dict[str, str]:
        """Return the heads that the plan unties, with their embeddings."""
        weighed = [p.name for p in plan.quantized if p.scheme.weights is not None]
        names = [name for name in weighed if name in self.heads]
        return {n: self.heads[n] for n in names if self._problem is None}


def untying_notes(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each head that is untied."""
    weighed = {p.name for p in plan.quantized if p.scheme.weights is not None}
    for head, embedding in plan.untied.items():
        stored = "stored quantized" if head in weighed else "stored"
        yield (
            f"{head} is untied from {embedding}: {stored} beside it, with "
            "tie_word_embeddings: false in config.json"
        )


def tied_errors(model: Any, plan: Plan) -> Iterator[str]:
    """Yield tied modules that cannot be quantized."""
    tied = tied_modules(model)
    weighed = {p.name for p in plan.quantized if p.scheme.weights is not None}
    for name in sorted(weighed & tied.keys() - plan.untied.keys()):
        other, problem = tied[name], untying_problem(model)
        if problem is not None:
            yield f"{name} shares its weight with {other}, and {problem}; add it to ignore"
        else:
            yield (
                f"{name} shares its weight with {other}; target {other} instead, which unties "
                "them, or untie them first (tie_word_embeddings=False, with a head of its own) and "
                "save the model"
            )
