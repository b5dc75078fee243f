"""The range of a histogram with the least cost, of all that end at an edge of its bins.

A range is turned into the scale and zero point that would be stored before it is judged. The
observed range is always a candidate and comes first: another replaces it only if it costs less.

For symmetric types every range [-m, m] is judged. A range with a zero point has two ends, too many
pairs to judge all: the search starts from the best range that cuts both ends in proportion, then
moves one end at a time to the best of all its edges, until neither moves.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from steelyard.kernels.bin_counts import BINS
from steelyard.kernels.qparams import qparams_from_range
from steelyard.observers.histogram_base import HistogramObserver

__all__ = ["HistogramSearch"]

_HALF = BINS // 2


class HistogramSearch(HistogramObserver):
    """Base of observers that judge ranges by a cost."""

    @abstractmethod
    def costs(
        self,
        counts: torch.Tensor,
        unit: torch.Tensor,
        zero_point: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """Return the cost of each candidate, (num_qparams, num_candidates) fp64.

        counts:           (num_qparams, BINS) int64
        unit, zero_point: (num_qparams, num_candidates) fp64; unit is the stored scale, in bins
        ends:             (2, num_qparams, num_candidates) int64, edges counted from zero
        """
        raise NotImplementedError

    def choose(
        self,
        counts: torch.Tensor,
        exponent: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        global_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.args.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        width = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).unsqueeze(-1)

        def ranges(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            below, above = (ends * width).to(low.dtype)
            return torch.maximum(below, low.unsqueeze(-1)), torch.minimum(above, high.unsqueeze(-1))

        def judged(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the ends of the first best candidate, (2, num_qparams), and its cost."""
            below, above = ranges(ends)
            scale, zero_point = qparams_from_range(
                below, above, self.args, self.scale_dtype, global_scale
            )
            effective = scale.reshape(below.shape).double()
            if global_scale is not None:
                effective = effective / global_scale.double().cpu()
            zero_point = zero_point.reshape(below.shape).double()
            costs = self.costs(counts, effective / width, zero_point, ends)
            least = costs.amin(-1, keepdim=True)
            first = (costs <= least).int().argmax(-1, keepdim=True)
            return ends.gather(-1, first.expand(2, -1, -1)).squeeze(-1), least.squeeze(-1)

        if self.args.symmetric:
            ends, _ = judged(_symmetric(len(counts)))
        else:
            ends, cost = judged(_proportional(low, high, width))
            moved = True
            while moved:
                moved = False
                for side in (1, 0):
                    trial, least = judged(_one_end_moved(ends, side))
                    better = least < cost
                    moved |= bool(better.any())
                    ends, cost = torch.where(better, trial, ends), torch.where(better, least, cost)
        below, above = ranges(ends.unsqueeze(-1))
        return below.squeeze(-1), above.squeeze(-1)


def _symmetric(rows: int) -> torch.Tensor:
    edge = torch.arange(_HALF, 0, -1)
    return torch.stack([-edge, edge]).unsqueeze(1).expand(2, rows, -1)


def _proportional(low: torch.Tensor, high: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Return ranges from the observed one down to one bin, (2, num_qparams, BINS / 2)."""
    fraction = torch.arange(_HALF, 0, -1, dtype=torch.float64) / _HALF
    below = torch.floor(low.unsqueeze(-1) / width * fraction)
    above = torch.ceil(high.unsqueeze(-1) / width * fraction)
    return _apart(torch.stack([below, above]).long())


def _one_end_moved(ends: torch.Tensor, side: int) -> torch.Tensor:
    """Return the range itself, and those with the lower (0) or upper (1) end at every edge."""
    edge = torch.arange(_HALF, -1, -1)
    trial = ends.unsqueeze(-1).repeat(1, 1, len(edge) + 1)
    trial[side, :, 1:] = edge if side else -edge
    return _apart(trial)


def _apart(ends: torch.Tensor) -> torch.Tensor:
    """Keep a bin between the ends."""
    ends = torch.stack([ends[0], torch.maximum(ends[1], ends[0] + 1)])
    beyond = (ends[1] > _HALF).long()
    return ends - beyond
