"""The search weighed by what each input channel carries: E[x^2], gathered during calibration.

A forward-pre hook sums the squares of a Linear's input. The raw sum and token count lie on the
observer and on the module, so that a gathering pass (attach, run, detach) can leave them there
for the observer of a second pass to pick up.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import distributed as dist

from steelyard.errors import ImportanceError, ImportanceWarning
from steelyard.observers.base import Observer
from steelyard.observers.helpers import flatten_for_calibration
from steelyard.observers.mse import MemorylessMSEObserver, SearchOptions

__all__ = ["IMatrixMSEObserver", "IMatrixOptions"]

IMATRIX_PRECISION = torch.float32


class IMatrixOptions(SearchOptions):
    """Options of the weighed search: a wider and coarser grid, and what to do without weights."""

    maxshrink: float = Field(
        default=0.95, ge=0, le=1, description="largest part of the range to give up"
    )
    grid: float = Field(
        default=20, gt=0, allow_inf_nan=False, description="steps into which the range is cut"
    )
    norm: float = Field(
        default=3.0, gt=0, allow_inf_nan=False, description="power to which errors are raised"
    )
    strict: bool = Field(
        default=False, description="make unusable importance an error, not a uniform search"
    )


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(MemorylessMSEObserver):
    """The best range of the last weight observed, errors weighed by E[x^2] of their column."""

    Options = IMatrixOptions

    _act_sync_dict: ClassVar = {
        "_imatrix_sum": dist.ReduceOp.SUM,
        "_imatrix_count": dist.ReduceOp.SUM,
    }

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.strict: bool = self.options.strict
        self._imatrix_sum: torch.Tensor | None = None
        self._imatrix_count: torch.Tensor = torch.tensor(0, dtype=torch.int64)
        self.fallback_reason: str | None = None

    # -- gathering --------------------------------------------------------------------------

    def attach(self, module: torch.nn.Module) -> None:
        """Take over what an earlier pass left on the module, or start to gather.

        Modules without `in_features` have no input channels to weigh and are left alone.
        """
        state = module.__dict__
        if "_imatrix_sum" in state:
            _remove_hook(module)
            self._imatrix_sum = state.pop("_imatrix_sum")
            self._imatrix_count = state.pop("_imatrix_count")
            return
        in_features = getattr(module, "in_features", None)
        if in_features is None:
            return
        self._imatrix_sum = torch.zeros(in_features, dtype=IMATRIX_PRECISION)
        self._imatrix_count = torch.tensor(0, dtype=torch.int64)
        self._share_with(module)
        state["_imatrix_hook"] = module.register_forward_pre_hook(self._gather)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop gathering; sum and count stay on the module for the next observer."""
        _remove_hook(module)

    @torch.no_grad()
    def _gather(self, module: torch.nn.Module, args: Any) -> None:
        x = args[0] if isinstance(args, tuple) and args else args
        x = x[0] if isinstance(x, tuple) and x else x
        if not isinstance(x, torch.Tensor) or self._imatrix_sum is None:
            return
        tokens = x.detach().reshape(-1, x.shape[-1])  # (tokens, in_features)
        squares = tokens.to(IMATRIX_PRECISION).square().sum(dim=0)
        if self._imatrix_sum.device != x.device:
            self._imatrix_sum = self._imatrix_sum.to(x.device)
            self._imatrix_count = self._imatrix_count.to(x.device)
            self._share_with(module)
        self._imatrix_sum += squares
        self._imatrix_count += len(tokens)

    def _share_with(self, module: torch.nn.Module) -> None:
        module.__dict__["_imatrix_sum"] = self._imatrix_sum
        module.__dict__["_imatrix_count"] = self._imatrix_count

    # -- weighing ---------------------------------------------------------------------------

    def importance_for(self, observed: torch.Tensor) -> torch.Tensor | None:
        """Return E[x^2] per column over its mean, flattened as the weight is.

        observed: (1, *qparam_shape, group_size)
        """
        problem = self._problem(observed)
        self.fallback_reason = problem
        if problem is not None:
            remedy = "gather importance over calibration data first"
            if self.strict:
                raise ImportanceError(f"{self.label}: {problem}; {remedy}, or set strict=False")
            warnings.warn(
                f"{self.label}: {problem}, so every column weighs alike; {remedy}, "
                "or set strict=True to make this an error",
                ImportanceWarning,
                stacklevel=2,
            )
            return None
        importance = self._importance().to(observed.device)
        importance = importance / importance.mean()
        if self._column_order is not None:
            importance = importance[self._column_order]
        rows = 1  # broadcasts over the rows of the weight, but a block or a tensor spans them
        if self.args.strategy in ("block", "tensor") and self.observed_shape is not None:
            rows = self.observed_shape[:-1].numel()
        return flatten_for_calibration(importance.expand(rows, -1), "weight", self.args)

    def _importance(self) -> torch.Tensor:
        assert self._imatrix_sum is not None
        return self._imatrix_sum / self._imatrix_count.to(self._imatrix_sum)

    def _problem(self, observed: torch.Tensor) -> str | None:
        """Return why importance cannot be used, or None if it can."""
        if self.base_name != "weight":
            return "importance weighs the columns of a weight, not an activation"
        if self._imatrix_sum is None or int(self._imatrix_count) == 0:
            return "importance is missing"
        importance = self._importance()
        if not bool(torch.isfinite(importance).all()):
            return f"importance has {int((~torch.isfinite(importance)).sum())} non-finite values"
        if bool((importance < 0).any()):
            return f"importance has {int((importance < 0).sum())} negative values"
        if not bool((importance > 0).any()):
            return "importance is all zero"
        columns = self._columns(observed)
        if importance.numel() != columns:
            return f"importance has size {importance.numel()}, but the weight has {columns} columns"
        return None

    def _columns(self, observed: torch.Tensor) -> int:
        if self.observed_shape is not None:
            return self.observed_shape[-1]
        return observed.shape[-2] * observed.shape[-1]  # channel or group, flattened

    # -- statistics -------------------------------------------------------------------------

    def get_statistics(self) -> dict[str, torch.Tensor]:
        statistics = super().get_statistics()
        if self._imatrix_sum is None:
            del statistics["_imatrix_count"]
        return statistics

    def merge(self, other: Observer) -> IMatrixMSEObserver:
        """Add the other's importance; a range found without it is dropped, so observe again."""
        super().merge(other)
        self._drop_range()
        return self

    def sync_activation_stats(self) -> list[dist.Work]:
        """Add the importance of all ranks; a range found without it is dropped."""
        works = super().sync_activation_stats()
        self._drop_range()
        return works

    def _drop_range(self) -> None:
        for name in self._statistics:
            self.__dict__.pop(name, None)
        self._kept = None

    def reset(self) -> None:
        super().reset()
        self._imatrix_sum = None
        self._imatrix_count = torch.tensor(0, dtype=torch.int64)
        self.fallback_reason = None


def _remove_hook(module: torch.nn.Module) -> None:
    hook = module.__dict__.pop("_imatrix_hook", None)
    if hook is not None:
        hook.remove()
