"""An evaluation with all that follows from it: the verdict, single tokens, and what blocks cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steelyard.data.tokenizer import tokenizer_of
from steelyard.engine.progress import progress
from steelyard.errors import DataError
from steelyard.evaluate.continuations import continuations
from steelyard.evaluate.diagnosis import Diagnosis, diagnose, probe_of
from steelyard.evaluate.divergence import Scored, evaluate
from steelyard.evaluate.evaluation import Evaluation
from steelyard.evaluate.larger_recipe import larger_recipe
from steelyard.evaluate.token_figures import Decode, TokenFigures, figures_of
from steelyard.evaluate.verdict import Limits, Verdict, judge

__all__ = ["Study", "study"]


@dataclass(frozen=True)
class Study:
    """An evaluation, its verdict, and where the loss is.

    recipe: gives the three blocks that cost most the next larger scheme; None if none would gain
    """

    evaluation: Evaluation
    verdict: Verdict
    tokens: TokenFigures
    diagnosis: Diagnosis | None = None
    recipe: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all parts as JSON types."""
        return {
            **self.evaluation.as_dict(),
            "verdict": self.verdict.as_dict(),
            "token_figures": self.tokens.as_dict(),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.as_dict(),
            "better_recipe": self.recipe,
        }


def study(
    base: str | Path,
    quantized: str | Path,
    data: Any,
    *,
    limits: Limits | None = None,
    blocks: bool = True,
    show_progress: bool | None = None,
    tokenizer: Any = None,
    trust_remote_code_model: bool = False,
    **options: Any,
) -> Study:
    """Compare a quantized checkpoint with its base model, as `evaluate` does, and judge it.

    limits: of the verdict
    blocks: find out what modules and blocks cost, which reads both models once more
    """
    made: list[Study] = []

    def then(scored: Scored) -> None:
        decode = _decoder(tokenizer, scored, trust_remote_code_model)
        found = diagnosis = recipe = None
        models = (scored.base, scored.quantized)
        if blocks:
            alone = [b for batch in scored.batches for b in _one_by_one(batch)]
            diagnosis = diagnose(*models, probe_of(alone), show_progress)
            recipe = larger_recipe(scored.quantized.source, diagnosis)
        with progress("continuing texts", len(models), show_progress) as advance:
            found = continuations(models, scored.batches, decode, advance)
        ids = [batch["input_ids"] for batch in scored.batches]
        tokens = figures_of(zip(ids, scored.chosen, scored.scores, strict=True), decode, found)
        verdict = judge(scored.evaluation, limits)
        made.append(Study(scored.evaluation, verdict, tokens, diagnosis, recipe))

    evaluate(
        base,
        quantized,
        data,
        tokenizer=tokenizer,
        trust_remote_code_model=trust_remote_code_model,
        show_progress=show_progress,
        then=then,
        **options,
    )
    return made[0]


def _decoder(tokenizer: Any, scored: Scored, trust_remote_code: bool) -> Decode:
    """Return the tokenizer's decoder; without a tokenizer, ids are shown."""
    try:
        found = tokenizer_of(tokenizer, scored.base.source, trust_remote_code)
    except DataError:
        return lambda ids: " ".join(f"#{each}" for each in ids)

    def decode(ids: Sequence[int]) -> str:
        return str(found.decode(ids))

    return decode


def _one_by_one(batch: Any) -> list[dict[str, torch.Tensor]]:
    """Return the samples of a batch without padding; a batch of one with features as it is."""
    ids = batch["input_ids"]
    if set(batch) - {"input_ids", "attention_mask"}:
        return [dict(batch)] if len(ids) == 1 else []
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    rows = [row[real][None] for row, real in zip(ids, mask, strict=True)]
    return [{"input_ids": row} for row in rows if row.shape[1] > 1]
