"""How far a quantized checkpoint is from the model that it was made from.

    evaluation = evaluate("path/to/model", "quantized", "held-out.txt")
    print(evaluation)

Perplexity alone hides much: a model may answer differently and be as good on average. So the two
are compared token by token, by the distributions that they give to the next one.
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
