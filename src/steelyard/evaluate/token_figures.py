"""What an evaluation shows of single tokens: a histogram, and the worst ones in their text."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from steelyard.evaluate.metrics import Scores

__all__ = ["Continuation", "TokenFigures", "WorstToken", "figures_of"]

LOW, HIGH, BINS = -6, 2, 48  # of the histogram: log10 of its ends
WORST = 20
BEFORE = 24  # tokens of text before a token

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class WorstToken:
    """A token where the models differ most: the text before it, and what each predicts.

    kl_divergence: None if it is infinite
    """

    kl_divergence: float | None
    before: str
    actual: str
    base: str
    quantized: str


@dataclass(frozen=True)
class Continuation:
    """The most likely continuation of one text by both models."""

    prompt: str
    base: str
    quantized: str


@dataclass(frozen=True)
class TokenFigures:
    """Figures of single tokens.

    counts: of tokens, in equal bins of log10 of the KL divergence from `low` to `high`; the first
            and the last have all beyond
    """

    low: float
    high: float
    counts: list[int]
    worst: list[WorstToken] = field(default_factory=list)
    continuations: list[Continuation] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor, Scores]],
    decode: Decode,
    continuations: list[Continuation] | None = None,
) -> TokenFigures:
    """Return the figures of scored batches.

    batches: token ids, (samples, tokens); which next tokens were scored; their scores
    """
    counts = torch.zeros(BINS, dtype=torch.int64)
    worst: list[tuple[float, int, torch.Tensor, int, int, int]] = []
    number = 0
    for ids, chosen, scores in batches:
        logs = scores.divergence.clamp_min(10.0**LOW).log10()
        places = ((logs - LOW) * BINS / (HIGH - LOW)).floor().long().clamp(0, BINS - 1)
        counts += torch.bincount(places, minlength=BINS)
        rows, columns = chosen.nonzero(as_tuple=True)  # the order of the scores
        for i in scores.divergence.topk(min(WORST, len(logs))).indices.tolist():
            number += 1
            value = float(scores.divergence[i])
            tops = int(scores.base_top[i]), int(scores.top[i])
            entry = (value, -number, ids[rows[i]], int(columns[i]), *tops)
            (heapq.heappush if len(worst) < WORST else heapq.heappushpop)(worst, entry)
    return TokenFigures(
        LOW,
        HIGH,
        counts.tolist(),
        [_shown(entry, decode) for entry in sorted(worst, key=_falling) if entry[0] > 0],
        continuations or [],
    )


def _falling(entry: Any) -> tuple[float, int]:
    return -entry[0], -entry[1]


def _shown(entry: tuple[float, int, torch.Tensor, int, int, int], decode: Decode) -> WorstToken:
    value, _, ids, position, base, quantized = entry
    before = ids[max(0, position + 1 - BEFORE) : position + 1].tolist()
    return WorstToken(
        value if math.isfinite(value) else None,
        decode(before),
        *(decode([token]) for token in (int(ids[position + 1]), base, quantized)),
    )
