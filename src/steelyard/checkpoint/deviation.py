"""How far a decoded weight is from the source, in steps of its own scales.

Rounding to the nearest code gives a deviation that is uniform between minus half a step and half a
step, so its mean square is 1/12 of a squared step; at most it is 1/4, three times that. GPTQ moves
weights that are not rounded yet to compensate the error of those that are: with 2 to 8 bits,
NVFP4, MXFP4 and FP8, ordered or not, and fewer tokens than columns, the largest was five times
1/12, and 17 times where it made up for drift too. Wrong codes (random, of another row or module,
with another scale or zero point) are several steps away: 50 times and more. What the run itself
reported of a weight tells how far it may be, if that is more. Where most codes are zero, because
outliers set the scale, codes of another row are close too; there the correlation decides.

Moving weights adds noise, but does not make them larger or smaller as a whole: the slope of the
decoded weights over those of the source stays near 1. Scales off by a factor of two, which the
coarse steps of MXFP4 hide, make it 2 or 0.5.

For a weight beyond the range of its scale, the deviation counts from the end of the range.

With 2 or 3 bits a scale that is too large moves no code by many steps. But observers choose scales
so that the largest weight of a group lies near the end of the range or beyond: 75 % of it with 2
bits, else more.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.formats import CodeGrid
from steelyard.kernels.rounding import minifloat, quantized_range
from steelyard.kernels.scale_blocks import divides

__all__ = ["Deviation"]

NEAREST, MOVED = 4.0, 28.0
"""Limits of the mean square, as multiples of 1/12: rounded to nearest, and by GPTQ."""
FAR = 2.0
"""Steps; arithmetic in bf16 misplaces a code of 8 bits by up to 1.25."""
CORRELATION = 0.3
SLOPE = 1.6
"""Most that decoded weights may be larger than the source's, as a whole, or smaller."""
RANGE = 0.35
"""Least fraction of the range that the largest weight of a typical group uses."""
REPORTED = 3.0
"""Most that the relative error of some rows may be, as a multiple of that reported for all."""
FINE = 1.0
"""Correlation and slope are checked where 1/12 squared step is below the weights' mean square."""


@dataclass
class Deviation:
    """Deviation of the compared rows, as sums."""

    count: int = 0
    noise: float = 0.0  # squared, in steps where a step is 1
    nominal: float = 0.0  # the same for a deviation uniform in each step
    far: int = 0  # weights more than FAR steps away
    error: float = 0.0  # squared
    signal: float = 0.0
    decoded: float = 0.0
    product: float = 0.0
    coarseness: float = 0.0  # squared steps / 12, in units of the weights
    ranges: list[float] = field(default_factory=list)  # fraction of its range that each group uses

    def add(
        self,
        original: torch.Tensor,
        decoded: torch.Tensor,
        grid: CodeGrid | None,
        args: QuantizationArgs,
        error_only: bool = False,
    ) -> None:
        """Add some rows.

        original, decoded: (rows, columns), fp32
        grid:              None where steps are not known; then only the correlation is checked
        error_only:        compute only `relative_error`
        """
        self.count += original.numel()
        self.error += _sum_of_squares(decoded - original)
        self.signal += _sum_of_squares(original)
        if error_only:
            return
        self.decoded += _sum_of_squares(decoded)
        self.product += float((original.double() * decoded).sum())
        if grid is None:
            return
        low, high = quantized_range(args)
        wanted = (original - grid.offset) / grid.step
        self.ranges += _ranges(wanted, -grid.offset / grid.step, args)
        wanted = wanted.clamp_(low, high)
        found = (decoded - grid.offset) / grid.step
        spacing = _spacing(wanted, found, args)
        usable = (grid.step != 0) & torch.isfinite(wanted) & torch.isfinite(found)
        away = torch.where(usable, wanted - found, 0.0)
        self.noise += _sum_of_squares(away)
        self.nominal += _sum_of_squares(torch.where(usable, spacing, 0.0)) / 12
        self.far += int((away.abs() > FAR * spacing).sum())
        self.coarseness += _sum_of_squares(torch.where(usable, spacing * grid.step, 0.0)) / 12

    @property
    def relative_error(self) -> float:
        return self.error / self.signal if self.signal else self.error

    @property
    def correlation(self) -> float:
        size = math.sqrt(self.signal * self.decoded)
        return self.product / size if size else 1.0

    @property
    def slope(self) -> float:
        """Slope of the regression of decoded weights on those of the source."""
        return self.product / self.signal if self.signal else 1.0

    def problem(self, nearest: bool, reported: float | None = None) -> str | None:
        """Return why these rows cannot be those of the source; None if they can.

        nearest:  every weight was rounded to the nearest code
        reported: relative error of the whole weight, as the run measured it
        """
        excess = self.noise / self.nominal if self.nominal else 0.0
        if not math.isfinite(self.error):
            return "decodes to values that are not finite"
        told = reported is not None and self.relative_error <= REPORTED * reported
        if excess > (NEAREST if nearest else MOVED) and (nearest or not told):
            steps = math.sqrt(excess / 12)
            usual = 0.29  # 1 / sqrt(12)
            return (
                f"decodes to values that are {steps:.2g} steps from the source (root mean square; "
                f"{usual} when rounded to nearest), correlation {self.correlation:.2f}"
            )
        if self.ranges and (share := statistics.median(self.ranges)) < RANGE:
            return (
                f"has scales that are too large: the source's weights use {share:.0%} of their "
                "range"
            )
        fine = self.coarseness <= FINE * self.signal
        if fine and self.signal and self.correlation < CORRELATION:
            return f"decodes to values whose correlation with the source is {self.correlation:.2f}"
        if fine and not 1 / SLOPE <= self.slope <= SLOPE:
            return (
                f"decodes to values that are {self.slope:.2g} times those of the source: its "
                "scales are wrong"
            )
        if nearest and self.far:
            return (
                f"has {self.far:,} of {self.count:,} decoded values more than {FAR:g} steps from "
                "the source, though its recipe rounds to nearest"
            )
        return None


def _ranges(scaled: torch.Tensor, zero: torch.Tensor, args: QuantizationArgs) -> list[float]:
    """Return the fraction of the range that the weights of each group use, without empty groups.

    scaled: (rows, columns), weights in units of the step, zero point added
    zero:   the same for a weight of 0, which is in every range
    """
    if args.strategy not in ("group", "channel", "tensor_group") or args.actorder == "group":
        return []
    width = args.group_size if args.group_size and args.group_size > 0 else scaled.shape[1]
    if not scaled.numel() or not divides(width, scaled.shape[1]):
        return []
    low, high = quantized_range(args)
    groups = scaled.reshape(-1, width)
    if args.symmetric:
        shares = groups.abs().amax(dim=1) / max(-low, high)
    else:
        zeros = zero.expand_as(scaled).reshape(-1, width)
        largest, smallest = torch.maximum(groups, zeros), torch.minimum(groups, zeros)
        shares = (largest.amax(dim=1) - smallest.amin(dim=1)) / (high - low)
    return [float(share) for share in shares[torch.isfinite(shares) & (shares > 0)].tolist()]


def _spacing(wanted: torch.Tensor, found: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return the distance between neighbouring codes at these values; 1 for integers."""
    if args.type == "int":
        return torch.ones_like(wanted)
    mantissa, smallest = minifloat(args.num_bits)
    size = torch.maximum(wanted.abs(), found.abs())
    exponent = torch.frexp(size).exponent - 1
    return torch.ldexp(torch.ones_like(size), exponent.clamp_(min=smallest) - mantissa)


def _sum_of_squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
