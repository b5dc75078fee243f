"""Computes `scale`, `zero_point` and `global_scale` from statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypedDict, cast, overload

import torch

from steelyard.errors import NoStatisticsError
from steelyard.fusion import shared_parameter
from steelyard.kernels.qparams import global_scale_of, qparams_from_range, scale_dtype_of

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

    from steelyard.observers.base import Observer

__all__ = ["ComputesQParams", "QParamsDict"]


class QParamsDict(TypedDict):
    """Result of `get_qparams`."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


class ComputesQParams:
    """Base of observers; computes parameters from the statistics and those of fused observers."""

    args: QuantizationArgs
    options: Any
    base_name: str
    min_vals: torch.Tensor
    max_vals: torch.Tensor
    observed_dtype: torch.dtype | None
    _fused_observers: set[Observer]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield scale and zero point, so that `scale, zero_point = observer(x)` unpacks."""
        qparams = self.get_qparams()
        yield qparams["scale"]
        yield qparams["zero_point"]

    @overload
    def get_qparams(self) -> QParamsDict: ...

    @overload
    def get_qparams(
        self, observed: torch.Tensor, g_idx: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @torch.no_grad()
    def get_qparams(
        self, observed: torch.Tensor | None = None, g_idx: torch.Tensor | None = None
    ) -> QParamsDict | tuple[torch.Tensor, torch.Tensor]:
        """Compute the parameters from the statistics; repeatable, changes nothing.

        Where fused observers share a scale, all of them must have observed something.

        observed: observe this first, and return scale and zero point, as in the first generation
        """
        this = cast("Observer", self)
        if observed is not None:
            scale, zero_point = this(observed, g_idx)
            return scale, zero_point
        shares = self._shares_scale or self.args.strategy == "tensor_group"
        for observer in (this, *(self._fused_observers if shares else ())):
            _require_statistics(observer, asked_by=this)
        global_scale = self.get_global_scale()
        scale, zero_point = self.compute_qparams(global_scale)
        if self._shares_scale:
            for other in self._fused_observers:
                theirs, _ = other.compute_qparams(global_scale)
                scale = torch.maximum(scale, theirs.to(scale))
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

    def compute_qparams(
        self, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point, given the global scale that will be stored with them."""
        this = cast("Observer", self)
        if this.calculates:
            return this.calculated(global_scale)
        min_vals, max_vals = self.chosen_range(global_scale)
        return qparams_from_range(min_vals, max_vals, self.args, self.scale_dtype, global_scale)

    def chosen_range(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range to store, given the global scale that will be stored with it."""
        return self.min_vals, self.max_vals

    def get_global_scale(self) -> torch.Tensor | None:
        """Return the divisor shared by all fused observers, (1,); None unless `tensor_group`."""
        if self.args.strategy != "tensor_group":
            return None
        absmax = self.global_absmax()
        for other in self._fused_observers:
            absmax = torch.maximum(absmax, other.global_absmax().to(absmax.device))
        return self.global_scale_for(absmax)

    def global_scale_for(self, absmax: torch.Tensor) -> torch.Tensor:
        """Return the global scale of values up to `absmax`, and of the headroom above them."""
        return global_scale_of(absmax * float(getattr(self.options, "headroom", 1)))

    def global_absmax(self) -> torch.Tensor:
        """Return the largest magnitude that the global scale must represent, a scalar."""
        this = cast("Observer", self)
        if this.calculates:
            return this.absmax
        return torch.maximum(-self.min_vals.amin(), self.max_vals.amax()).clamp(min=0)

    @property
    def scale_dtype(self) -> torch.dtype:
        """The type in which scales are stored, and for which they are chosen."""
        return scale_dtype_of(self.args, self.observed_dtype or self.min_vals.dtype)

    @property
    def _shares_scale(self) -> bool:
        """A per-tensor FP8 weight has one scale for the fused matrix."""
        return shared_parameter(self.args, self.base_name) == "weight_scale"


def _require_statistics(observer: Observer, asked_by: Observer) -> None:
    if observer.has_statistics:
        return
    if observer is asked_by:
        raise NoStatisticsError(
            f"No statistics available for {observer.label}: call observer(value) first, "
            "with a value that is not empty"
        )
    raise NoStatisticsError(
        f"No statistics available for {observer.label}, which is fused with {asked_by.label}: "
        "observe all of them before calling get_qparams"
    )
