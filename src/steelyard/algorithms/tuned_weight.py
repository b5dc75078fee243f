"""The rounding of one weight as parameters that gradients can move.

    code  = round(clip(target / s + zero_point + v))        v: one offset per weight
    value = (code - zero_point) s,   s = stored(scale c)     c: one factor per scale

`target` is the value that would be best for the weight while all others stay, q_j + (H e)_j / H_jj,
drawn into the cell of the code that the weight has at the start. So v = 0 and c = 1 give the start,
and the weights that move first are those whose other code costs least. The original weight says
nothing of the kind: GPTQ has moved its neighbours to make up for it.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.nn import Module

from steelyard.kernels.fake_quantize import code_step, fake_quantize, spread, stored_scale
from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.qparams import scale_dtype_of
from steelyard.kernels.rounding import quantized_range, round_to_type

__all__ = ["TunedWeight"]

_LEAST, _MOST = 0.5, 1.5  # factors of scales
_INSIDE = 0.99  # share of the way to the edge of a cell


class TunedWeight:
    """Offsets and factors of the weight of a quantized module.

    wanted: (out, in), the value that would be best for each weight while all others stay
    scales: whether to tune scales, where each row has scales of its own
    """

    def __init__(self, module: Module, wanted: torch.Tensor, scales: bool) -> None:
        solved: Any = module
        self.args: QuantizationArgs = solved.quantization_scheme.weights
        self.start: tuple[torch.Tensor, torch.Tensor] = (
            solved.weight.data,
            solved.weight_scale.data,
        )
        self._zeros = None if self.args.symmetric else solved.weight_zero_point.data
        self._divisor = getattr(solved, "weight_global_scale", None)
        groups = getattr(solved, "weight_g_idx", None)
        self._together = None if groups is None else torch.argsort(groups, stable=True)
        self._apart = None if self._together is None else torch.argsort(self._together)
        self._scale = self.start[1].float()
        self._scale_dtype = scale_dtype_of(self.args, self.start[1].dtype)
        self._target = self._drawn(_columns(wanted, self._together).float())
        self.offset = torch.zeros_like(self._target, requires_grad=True)
        moves = scales and self._grid(self.start[1]).movable
        self.factor = torch.ones_like(self._scale, requires_grad=True) if moves else None

    def _drawn(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the target of rounding: a weight, drawn into the cells of the start's codes."""
        shape = weight.shape[0], weight.shape[1]
        scale = self._scale if self._divisor is None else self._scale / self._divisor
        wide = spread(scale, self.args, shape)
        zeros = 0.0 if self._zeros is None else spread(self._zeros.float(), self.args, shape)
        stored = _columns(self.start[0], self._together).float()
        low, high = quantized_range(self.args)
        codes = round_to_type((stored / wide + zeros).clamp_(low, high), self.args)
        off = (weight / wide + zeros).clamp_(low, high).sub_(codes)
        # small floats have cells whose two sides differ at powers of two
        outward = torch.where(off * codes >= 0, 1.01, 0.99)
        half = code_step(codes * outward, self.args) * (0.5 * _INSIDE)
        places = codes + torch.minimum(torch.maximum(off, -half), half)
        return (places - zeros) * wide

    def values(self) -> torch.Tensor:
        """Return the weight as it is stored now, (out, in), fp32; differentiable."""
        scale = self._scale if self.factor is None else self._scale * self.factor
        found = fake_quantize(
            self._target,
            scale,
            self._zeros,
            self.args,
            self._divisor,
            self.offset,
            None if self.factor is None else self._scale_dtype,
        )
        return _columns(found, self._apart)

    def step(self, gradient: torch.Tensor, lr: float, scale_lr: float) -> None:
        """Move offsets and factors against the signs of their gradients.

        gradient: (out, in), of the loss by `values`
        """
        with torch.enable_grad():
            moved = [self.offset] if self.factor is None else [self.offset, self.factor]
            signs = torch.autograd.grad(self.values(), moved, gradient)
        with torch.no_grad():
            self.offset.sub_(signs[0].sign_(), alpha=lr).clamp_(-0.5, 0.5)
            if self.factor is not None:
                self.factor.sub_(signs[1].sign_(), alpha=scale_lr).clamp_(_LEAST, _MOST)

    @torch.no_grad()
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight and scale as they would be stored, in the types of the start.

        A row that packing would store as other codes stays as at the start.
        """
        weight, scale = self.start
        if self.factor is not None:
            moved = stored_scale(self._scale * self.factor, self._scale_dtype)
            scale = moved.to(scale.dtype)
        grid = self._grid(scale)
        became = grid.held(_columns(self.values(), self._together)) + 0.0
        kept = grid.keeps(became)
        became = _columns(became, self._apart)
        return (
            torch.where(kept.unsqueeze(1), became, weight),
            grid.with_rows(self.start[1], scale, kept),
        )

    def decoded(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the values that a stored weight decodes to, (out, in), fp32."""
        given = _columns(weight, self._together).float()
        found = fake_quantize(given, scale.float(), self._zeros, self.args, self._divisor)
        return _columns(found, self._apart)

    def _grid(self, scale: torch.Tensor) -> Grid:
        weight = _columns(self.start[0], self._together)
        return Grid.of(weight, scale, self._zeros, self.args, self._divisor, False, None)


def _columns(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return x if order is None else x.index_select(1, order)
