"""Measures how far a quantized checkpoint is from its base model.

    evaluation = evaluate("path/to/model", "quantized", "held-out.txt")
    print(evaluation)

Perplexity alone hides changes: a model may answer differently and score the same on average. So the
two models are compared token by token, by their distributions over the next token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard.evaluate.evaluation import Evaluation, EvaluationInterrupted

if TYPE_CHECKING:
    from steelyard.evaluate.divergence import evaluate

__all__ = ["Evaluation", "EvaluationInterrupted", "evaluate"]


def __getattr__(name: str) -> object:
    if name != "evaluate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from steelyard.evaluate.divergence import evaluate  # torch and transformers take seconds

    globals()[name] = evaluate
    return evaluate
