"""Standard errors of means over tokens of text.

Neighbouring tokens are not independent: a hard passage is hard for many of them. So tokens are
summed over runs of 64 in a row first, and the runs are taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["RUN", "mean_and_error", "quantile_interval"]

RUN = 64  # tokens
SURE = 2.0  # standard errors on either side


def mean_and_error(samples: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the mean over all tokens, and its standard error; infinite for fewer than two runs.

    samples: per sample, (tokens)
    """
    runs = [
        sample[start : start + RUN].double()
        for sample in samples
        for start in range(0, len(sample), RUN)
    ]
    count = sum(map(len, runs))
    mean = sum(float(run.sum()) for run in runs) / count
    if len(runs) < 2:
        return mean, math.inf
    squares = sum((float(run.sum()) - len(run) * mean) ** 2 for run in runs)
    return mean, math.sqrt(squares * len(runs) / (len(runs) - 1)) / count


def quantile_interval(ordered: torch.Tensor, fraction: float) -> tuple[float, float]:
    """Return bounds of a quantile, two standard errors of its rank on either side.

    The upper bound is infinite if too few values are above the quantile to tell.

    ordered: (tokens), rising
    """
    count = len(ordered)
    spread = SURE * math.sqrt(count * fraction * (1 - fraction))
    low, high = math.floor(count * fraction - spread), math.ceil(count * fraction + spread)
    bound = float(ordered[high - 1]) if high <= count else math.inf
    return float(ordered[max(low, 1) - 1]), bound
