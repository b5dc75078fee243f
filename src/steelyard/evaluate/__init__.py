"""Measures how far a quantized checkpoint is from its base model.

    evaluation = evaluate("path/to/model", "quantized", "held-out.txt")
    print(evaluation)
    found = study("path/to/model", "quantized", "held-out.txt")
    print(found.verdict.word, found.verdict.reasons)
    compared = compare_checkpoints("path/to/model", ["quantized", "other"], "held-out.txt")

Perplexity alone hides changes: a model may answer differently and score the same on average. So the
two models are compared token by token, by their distributions over the next token. `study` adds the
verdict, single tokens, and what modules and blocks cost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from steelyard.evaluate.evaluation import Evaluation, EvaluationInterrupted

if TYPE_CHECKING:
    from steelyard.evaluate.checkpoint_comparison import compare_checkpoints
    from steelyard.evaluate.divergence import evaluate
    from steelyard.evaluate.studies import Study, study
    from steelyard.evaluate.verdict import Limits, Verdict, judge

__all__ = [
    "Evaluation",
    "EvaluationInterrupted",
    "Limits",
    "Study",
    "Verdict",
    "compare_checkpoints",
    "evaluate",
    "judge",
    "study",
]

_LAZY = {  # torch and transformers take seconds
    "compare_checkpoints": "checkpoint_comparison",
    "evaluate": "divergence",
    "study": "studies",
    "Study": "studies",
    "Limits": "verdict",
    "Verdict": "verdict",
    "judge": "verdict",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
    found = globals()[name] = getattr(module, name)
    return found
