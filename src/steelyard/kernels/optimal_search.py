"""The exact search: among every scale that can be stored, one with the least error.

For a group x with weights w, a scale s and a zero point z, the server reconstructs
s * (round(x / s + z) - z), rounded into the quantized type. The error E(s, z) is the weighted sum
of |differences| ** norm. Of all codes that a scale's type has, two runs need not be tried, whatever
the norm, since both hold for each value of the group by itself:

- Above. If nothing is clipped at s, the grid of 2s is part of the grid of s as far as the values
  reach, so E(2s) >= E(s). With s_u a scale at which nothing is clipped, codes from 2 * s_u on
  cannot win, provided that half of the code is a code (false only among the subnormal ones).
- Below. The error of the clipped values alone is at most E, and only grows as s falls. Once it
  exceeds the best error found, no smaller code can win.

What is left is tried in full, so the result is the optimum. There are two exceptions. Of fp32
scales, 2^23 per octave are too many: those that bf16 has too and the one of the range are tried,
and the best is refined by least squares, or Newton's method if the norm is not 2. An asymmetric
float, which no server reads, is not searched: it gets the parameters of its range.

Errors are compared in fp64. Some scales are exactly as good: s and -s if the group reaches equally
far to both sides, or a power of two and its half. Of those the first tried stays: codes from the
first unclipped one down, then up; positive ones before negative ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels.fast_search import fast_search
from steelyard.kernels.qparams import qparams_from_range
from steelyard.kernels.range import compute_dtype, range_of
from steelyard.kernels.rounding import quantized_range, reconstruct

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["optimal_qparams", "scale_codes"]


def scale_codes(dtype: torch.dtype) -> torch.Tensor:
    """Return every positive finite scale that `dtype` stores, in order, fp64.

    For fp32 and fp64: those that bf16 stores too.
    """
    if dtype == torch.uint8:
        return torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127)
    if dtype == torch.float8_e4m3fn:
        return torch.arange(1, 127, dtype=torch.uint8).view(dtype).to(torch.float64)
    if dtype in (torch.float32, torch.float64):
        return scale_codes(torch.bfloat16)
    top = torch.finfo(dtype).max
    last = int(torch.tensor(top, dtype=dtype).view(torch.int16))
    return torch.arange(1, last + 1, dtype=torch.int16).view(dtype).to(torch.float64)


def optimal_qparams(
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    importance: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    observed_range: tuple[torch.Tensor, torch.Tensor] | None = None,
    negative_scales: bool = False,
    group_dims: int = 1,
    backend: str | None = None,
    norm: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored scale and zero point with the least sum of importance * |error| ** norm.

    observed:        (num_observations, *qparam_shape, group_size), any floating type
    importance:      broadcasts to observed, not negative
    negative_scales: let the scale of a symmetric integer be below zero
    norm:            1 to 8
    returns:         scale and zero_point (*qparam_shape), typed as by `qparams_from_range`
    """
    low, high = observed_range or range_of(observed, group_dims, backend)
    typed_scale, typed_zero_point = qparams_from_range(
        low, high, args, scale_dtype, global_scale, backend
    )
    if args.type == "float" and not args.symmetric:
        return typed_scale, typed_zero_point
    negative_scales = negative_scales and args.type == "int" and args.symmetric
    search = fast_search("optimal_qparams", observed, args, scale_dtype, backend)
    if search is not None:
        scale, zero_point = search(
            observed,
            args,
            scale_dtype,
            importance,
            global_scale,
            (low, high),
            negative_scales,
            group_dims,
            norm,
        )
    else:
        scale, zero_point = _reference(
            observed,
            args,
            scale_dtype,
            importance,
            global_scale,
            (typed_scale, typed_zero_point),
            negative_scales,
            group_dims,
            norm,
        )
    scale = scale.reshape(typed_scale.shape).to(typed_scale.dtype)
    # a group of zeros, or of zero weight, has no best scale: it keeps the one of its range
    empty = scale == 0
    scale = torch.where(empty, typed_scale, scale)
    if zero_point is None:
        return scale, typed_zero_point
    zero_point = zero_point.reshape(typed_scale.shape).to(typed_zero_point.dtype)
    return scale, torch.where(empty, typed_zero_point, zero_point)


def _reference(
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    importance: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    of_range: tuple[torch.Tensor, torch.Tensor],
    negative_scales: bool,
    group_dims: int,
    norm: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = compute_dtype(observed.dtype)
    weights = None if importance is None else importance.expand_as(observed).flatten(-group_dims)
    values = observed.flatten(-group_dims) if group_dims == 2 else observed
    count = values[0, ..., 0].numel()
    x = values.reshape(values.shape[0], count, -1).transpose(0, 1).flatten(1).to(dtype)
    w = torch.ones_like(x)
    if weights is not None:
        w = weights.reshape(values.shape[0], count, -1).transpose(0, 1).flatten(1).to(dtype)
    search = _Search(x, w, args, scale_dtype, global_scale, norm)
    search.run(1)
    if search.refined:
        search.try_range(*of_range)
        search.refine(1)
    if negative_scales:
        search.run(-1)
        if search.refined:
            search.refine(-1)
    return search.scale, None if args.symmetric else search.zero_point


class _Search:
    """All groups at once: x and w are (num_qparams, group_size), in the type of the scales."""

    def __init__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        args: QuantizationArgs,
        scale_dtype: torch.dtype,
        global_scale: torch.Tensor | None,
        norm: float,
    ) -> None:
        self.dtype, self.args, self.norm = x.dtype, args, norm
        self.x, self.w = x.double(), w.double()
        # powers of differences over the largest magnitude neither overflow nor vanish
        largest = self.x.abs().amax(1)
        self.unit = torch.where((largest > 0) & (norm != 2), largest, 1)
        self.qmin, self.qmax = quantized_range(args)
        self.global_scale = 1.0 if global_scale is None else float(global_scale)
        codes = scale_codes(scale_dtype)
        # a code over the global scale must stay finite
        usable = codes <= torch.finfo(x.dtype).max * self.global_scale
        usable[0] = True
        self.codes = codes[usable].to(x.device)
        halves = {torch.uint8: 2.0**-126, torch.float32: 2.0**-125, torch.float64: 2.0**-125}
        self.halves_above = halves.get(scale_dtype) or 2 * torch.finfo(scale_dtype).smallest_normal
        self.best = torch.full((len(x),), float("inf"), dtype=torch.float64, device=x.device)
        self.scale = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        self.zero_point = torch.zeros_like(self.scale)
        self.refined = scale_dtype in (torch.float32, torch.float64)

    def run(self, sign: int) -> None:
        """Try every code that could win; `sign` -1 tries its negative."""
        weighing = torch.where(self.w > 0, self.x * sign, 0)
        low, high = weighing.amin(1).clamp(max=0), weighing.amax(1).clamp(min=0)
        if self.args.symmetric:
            unclipped = torch.maximum(high / self.qmax, low / self.qmin)
        else:
            unclipped = (high - low) / (self.qmax - self.qmin - 2)
        alive = unclipped > 0
        stored = unclipped * self.global_scale
        start = torch.searchsorted(self.codes, stored).clamp(max=len(self.codes) - 1)
        bound = (2 * stored * (1 + 1e-6)).clamp(min=self.halves_above)
        code, open_ = start.clone(), alive.clone()
        while bool(open_.any()):
            open_ = self._try(code, open_, low, sign) & (code > 0) & (self.best > 0)
            code = (code - 1).clamp(min=0)
        code = start + 1
        open_ = alive & (self.best > 0)
        while True:
            open_ = open_ & (code < len(self.codes))
            code = code.clamp(max=len(self.codes) - 1)
            open_ = open_ & (self.codes[code] < bound) & (self.best > 0)
            if not bool(open_.any()):
                break
            self._try(code, open_, low, sign)
            code = code + 1

    def _try(
        self, code: torch.Tensor, groups: torch.Tensor, low: torch.Tensor, sign: int
    ) -> torch.Tensor:
        """Try one code per group; return the groups where clipping does not rule it out."""
        rows = groups.nonzero().squeeze(1)
        stored = sign * self.codes[code[rows]]
        chance = torch.zeros_like(groups)
        if self.args.symmetric:
            possible = sum(self._clipped(rows, stored, torch.zeros_like(stored))) <= self.best[rows]
            chance[rows[possible]] = True
            self._keep(rows[possible], stored[possible], torch.zeros_like(stored[possible]))
            return chance
        middle = (
            (self.qmin - low[rows] / self._effective(stored)).clamp(self.qmin, self.qmax).round()
        )
        for direction in (1, -1):
            zero_point = middle if direction > 0 else middle - 1
            going = torch.ones_like(rows, dtype=torch.bool)
            while True:
                going &= (zero_point >= self.qmin) & (zero_point <= self.qmax)
                if not bool(going.any()):
                    break
                below, above = self._clipped(rows, stored, zero_point)
                possible = going & (below + above <= self.best[rows])
                chance[rows[possible]] = True
                self._keep(rows[possible], stored[possible], zero_point[possible])
                going &= (above if direction > 0 else below) <= self.best[rows]
                zero_point = zero_point + direction
        return chance

    def _effective(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored.to(self.dtype) / self.global_scale).double()

    def _clipped(
        self, rows: torch.Tensor, stored: torch.Tensor, zero_point: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the error of values below and above what can be represented."""
        scale, x = self._effective(stored).unsqueeze(1), self.x[rows]
        ends = torch.stack([scale * (q - zero_point.unsqueeze(1)) for q in (self.qmin, self.qmax)])
        below, above = (ends.amin(0) - x).clamp(min=0), (x - ends.amax(0)).clamp(min=0)
        return self._error(rows, below), self._error(rows, above)

    def _error(self, rows: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        if self.norm == 2:
            return (difference.square() * self.w[rows]).sum(1)
        relative = difference.abs() / self.unit[rows].unsqueeze(1)
        return (relative.pow(self.norm) * self.w[rows]).sum(1)

    def _keep(self, rows: torch.Tensor, stored: torch.Tensor, zero_point: torch.Tensor) -> None:
        """Keep candidates better than the best so far."""
        zp = None if self.args.symmetric else zero_point.unsqueeze(1)
        x, scale = self.x[rows], self._effective(stored).unsqueeze(1)
        error = self._error(rows, reconstruct(x, scale, zp, self.args) - x)
        better = error < self.best[rows] * (1 - 1e-12)
        chosen = rows[better]
        self.best[chosen] = error[better]
        self.scale[chosen] = stored[better]
        self.zero_point[chosen] = zero_point[better]

    def try_range(self, scale: torch.Tensor, zero_point: torch.Tensor) -> None:
        """Try the parameters of the range, which bf16 need not have."""
        rows = (self.best > 0).nonzero().squeeze(1)
        rows = rows[torch.isfinite(self.best[rows])]  # the others have zero weight
        self._keep(rows, scale.flatten()[rows].double(), zero_point.flatten()[rows].double())

    def refine(self, sign: int) -> None:
        """Refine for the codes that the best scale assigns."""
        for _ in range(8):
            rows = ((self.scale * sign > 0) & (self.best > 0)).nonzero().squeeze(1)
            scale = self._effective(self.scale[rows]).unsqueeze(1)
            zp = None if self.args.symmetric else self.zero_point[rows].unsqueeze(1)
            q = reconstruct(self.x[rows], scale, zp, self.args) / scale
            weighed = q * self.w[rows]
            if self.norm == 2:
                fitted = (self.x[rows] * weighed).sum(1) / (q * weighed).sum(1).clamp(min=1e-30)
            else:
                d = self.x[rows] / scale - q
                weighed = weighed * d.abs().clamp(min=1e-3).pow(self.norm - 2)
                step = (d * weighed).sum(1) / (q * weighed).sum(1).clamp(min=1e-30)
                fitted = scale.squeeze(1) * (1 + step / max(1.0, self.norm - 1))
            stored = (fitted * self.global_scale).to(self.dtype).double()
            usable = stored * sign > 0
            before = self.scale.clone()
            self._keep(rows[usable], stored[usable], self.zero_point[rows[usable]])
            if torch.equal(before, self.scale):
                return
