"""Compares checkpoints of one model, whichever tool wrote them: size against KL divergence.

All are scored on the same tokens. So whether one is closer to the original than another is judged
by the differences of single tokens, whose standard error is far below that of either mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.shards import Shards
from steelyard.errors import OptionError
from steelyard.evaluate.divergence import Scored, evaluate_all
from steelyard.evaluate.evaluation import Evaluation
from steelyard.evaluate.standard_error import mean_and_error
from steelyard.evaluate.verdict import Limits, Verdict, judge
from steelyard.formats.descriptions import scheme_label
from steelyard.formats.tensor_names import WEIGHT, base_of
from steelyard.model.source import Source

__all__ = ["CheckpointComparison", "ComparedCheckpoint", "compare_checkpoints"]

REPORT = "report.html"


@dataclass(frozen=True)
class ComparedCheckpoint:
    """One checkpoint beside the others.

    name:       its folder or its name on the hub, as short as it differs from the others
    schemes:    scheme -> number of weights
    nbytes:     size of all its tensors
    bits_per_weight: of the quantized weights, with scales; None if none is
    report:     the page of its own report, if it has one
    behind:     KL divergence more than the closest checkpoint's; 0 for that itself
    behind_error: standard error of this difference; None if there are too few tokens for one
    smallest:   no other is both smaller and closer to the original
    """

    name: str
    folder: Path
    schemes: dict[str, int]
    nbytes: int
    bits_per_weight: float | None
    evaluation: Evaluation
    verdict: Verdict
    report: Path | None
    behind: float
    behind_error: float | None
    smallest: bool

    @property
    def within_noise(self) -> bool:
        """Whether it cannot be told from the closest by these tokens."""
        error = self.behind_error
        return self.behind == 0 or error is None or self.behind <= 2 * error

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "schemes": self.schemes,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
            "report": None if self.report is None else str(self.report),
            "kl_behind": self.behind,
            "kl_behind_error": self.behind_error,
            "smallest": self.smallest,
            "evaluation": self.evaluation.as_dict(),
            "verdict": self.verdict.as_dict(),
        }


@dataclass(frozen=True)
class CheckpointComparison:
    """Several checkpoints of one model, the closest to it first."""

    base: str
    base_bytes: int
    checkpoints: list[ComparedCheckpoint]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        checkpoints = [each.as_dict() for each in self.checkpoints]
        return {"base": self.base, "base_bytes": self.base_bytes, "checkpoints": checkpoints}


def compare_checkpoints(
    base: str | Path,
    quantized: Sequence[str | Path],
    data: Any,
    *,
    limits: Limits | None = None,
    **options: Any,
) -> CheckpointComparison:
    """Score checkpoints on the same held-out tokens; the base model runs once.

    limits:  of the verdicts
    options: of `evaluate`
    """
    if not quantized:
        raise OptionError("there is no checkpoint to compare: pass at least one")
    scored = list(evaluate_all(base, quantized, data, **options))
    names = _short([str(each) for each in quantized])
    found = list(_compared(scored, names, limits))
    first = scored[0].base.source
    return CheckpointComparison(str(base), _size(first), found)


def _compared(
    scored: Sequence[Scored], names: Sequence[str], limits: Limits | None
) -> Iterator[ComparedCheckpoint]:
    order = sorted(range(len(scored)), key=lambda i: scored[i].evaluation.kl_divergence)
    sizes = [_size(each.quantized.source) for each in scored]
    closest = _divergences(scored[order[0]])
    smallest = math.inf
    for number in order:
        each, source = scored[number], scored[number].quantized.source
        more = [now - least for now, least in zip(_divergences(each), closest, strict=True)]
        behind, error = mean_and_error(more)
        folder = Path(source.shards.folder) if source.shards is not None else Path()
        page = folder / REPORT
        yield ComparedCheckpoint(
            name=names[number],
            folder=folder,
            **_stored(source),
            nbytes=sizes[number],
            evaluation=each.evaluation,
            verdict=judge(each.evaluation, limits),
            report=page if page.is_file() else None,
            behind=behind,
            behind_error=error if math.isfinite(error) else None,
            smallest=sizes[number] < smallest,
        )
        smallest = min(smallest, sizes[number])


def _divergences(scored: Scored) -> list[torch.Tensor]:
    return [each.divergence for each in scored.scores]


def _size(source: Source) -> int:
    """Return the bytes of all tensors in the files."""
    assert source.shards is not None
    with Shards(source.shards.folder) as shards:
        return shards.total_bytes


def _stored(source: Source) -> dict[str, Any]:
    """Return how many weights have each scheme, and their bits."""
    view = source.shards
    assert view is not None
    schemes: dict[str, int] = {}
    weights = nbytes = 0
    with Shards(view.folder) as shards:
        for module, scheme in getattr(view, "schemes", {}).items():
            label = scheme_label(scheme)
            schemes[label] = schemes.get(label, 0) + 1
            weights += math.prod(view.info(f"{module}.{WEIGHT}").shape)
        for name in shards:
            module, _, leaf = name.rpartition(".")
            if module in getattr(view, "schemes", {}) and WEIGHT in (leaf, base_of(leaf)):
                nbytes += shards.info(name).nbytes
    return {"schemes": schemes, "bits_per_weight": 8 * nbytes / weights if weights else None}


def _short(names: Sequence[str]) -> list[str]:
    """Return names without the folders that all of them are in.

    >>> _short(["out/w4/", "out/w8"])
    ['w4', 'w8']
    """
    parts = [Path(name).parts for name in names]
    longest = max(len(each) for each in parts)
    for length in range(1, longest + 1):
        short = ["/".join(each[-length:]) for each in parts]
        if len(set(short)) == len(set(parts)):
            return short
    return list(names)
