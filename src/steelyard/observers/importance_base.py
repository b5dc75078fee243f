"""Importance: E[x^2] of each input channel, gathered during calibration.

A forward-pre hook sums the squares of a Linear's input. The observer and the module both hold the
raw sum and the token count, so that after one pass (attach, run, detach) the observer of a second
pass finds them on the module. The sum is also kept in bins (`kernels.exact_sum`), so that neither
the order of batches nor the number of ranks changes it.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import distributed as dist

from steelyard.errors import ImportanceError, ImportanceUnsupported, ImportanceWarning
from steelyard.kernels.exact_sum import add_exactly, carried, empty_bins, total
from steelyard.kernels.squares import sum_of_squares
from steelyard.observers.base import Observer
from steelyard.observers.combine import EXACT_SUM
from steelyard.observers.helpers import flatten_for_calibration
from steelyard.observers.padding import real_tokens

__all__ = ["ImportanceObserver"]

IMATRIX_PRECISION = torch.float32
_RAW = ("_imatrix_sum", "_imatrix_count", "_imatrix_bins")  # on the observer and on the module
_CARRY_AFTER = 1024  # batches that the bins hold without a carry


class ImportanceObserver(Observer):
    """Base of weight observers that weight the error of each column by E[x^2] of its input."""

    needs_importance: ClassVar[bool] = True
    """Whether to warn when importance is missing."""

    _act_sync_dict: ClassVar = {
        "_imatrix_sum": dist.ReduceOp.SUM,
        "_imatrix_count": dist.ReduceOp.SUM,
        "_imatrix_bins": EXACT_SUM,
    }

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.strict: bool = self.options.strict
        self._imatrix_sum: torch.Tensor | None = None
        self._imatrix_count: torch.Tensor = torch.tensor(0, dtype=torch.int64)
        self._imatrix_bins: torch.Tensor | None = None
        self._uncarried = 0  # batches in the bins
        self.power = 1.0  # of E[x^2]
        self.fallback_reason: str | None = None

    # -- gathering --------------------------------------------------------------------------

    def attach(self, module: torch.nn.Module) -> None:
        """Use the sums of an earlier pass on the module, or start to gather.

        Modules without `in_features` have no input channels and are skipped.
        """
        state = module.__dict__
        if "_imatrix_sum" in state:
            _remove_hook(module)
            self._imatrix_sum = state.pop("_imatrix_sum")
            self._imatrix_count = state.pop("_imatrix_count")
            self._imatrix_bins = state.pop("_imatrix_bins", None)
            return
        in_features = getattr(module, "in_features", None)
        if in_features is None:
            return
        with torch.inference_mode(False):  # later forward passes may not run in inference mode
            self._imatrix_sum = torch.zeros(in_features, dtype=IMATRIX_PRECISION)
            self._imatrix_count = torch.tensor(0, dtype=torch.int64)
        self._share_with(module)
        state["_imatrix_hook"] = module.register_forward_pre_hook(self._gather)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop gathering; keep sum and count on the module for the next observer."""
        if _remove_hook(module):
            self._sum_bins()
            self._share_with(module)

    def stop_gathering(self, module: torch.nn.Module) -> bool:
        """Stop gathering and discard the sums; return whether it was gathering."""
        gathered = self.gathers(module)
        if gathered:
            self.detach(module)
            self.reset()
        return gathered

    @torch.no_grad()
    def _gather(self, module: torch.nn.Module, args: Any) -> None:
        x = args[0] if isinstance(args, tuple) and args else args
        x = x[0] if isinstance(x, tuple) and x else x
        if not isinstance(x, torch.Tensor):
            return
        x = real_tokens(x, "input")
        if x.numel() == 0:
            return
        if self._imatrix_sum is None:  # reset while gathering
            self._imatrix_sum = torch.zeros(x.shape[-1], dtype=IMATRIX_PRECISION)
        if self._imatrix_sum.device != x.device:
            self._imatrix_sum = self._imatrix_sum.to(x.device)
            self._imatrix_count = self._imatrix_count.to(x.device)
        self._add(sum_of_squares(x))
        self._imatrix_count += x.numel() // x.shape[-1]
        self._share_with(module)  # a reset, a file or another device may have replaced them

    def _add(self, squares: torch.Tensor) -> None:
        """Add the squares of one batch to the bins, and update the sum."""
        assert self._imatrix_sum is not None
        bins = self._bins().to(squares.device)
        add_exactly(bins, squares)
        self._uncarried += 1
        if self._uncarried % _CARRY_AFTER == 0:
            bins.copy_(carried(bins))
        self._imatrix_bins = bins
        self._imatrix_sum += squares

    def _bins(self) -> torch.Tensor:
        """Return the bins; a sum without bins is added to empty ones."""
        assert self._imatrix_sum is not None
        if self._imatrix_bins is None:
            with torch.inference_mode(False):
                self._imatrix_bins = empty_bins(len(self._imatrix_sum), self._imatrix_sum.device)
            add_exactly(self._imatrix_bins, self._imatrix_sum)
        return self._imatrix_bins

    def _sum_bins(self) -> None:
        """Recompute the sum from the bins, in place, since a module may share the tensor."""
        if self._uncarried and self._imatrix_sum is not None and self._imatrix_bins is not None:
            self._imatrix_bins.copy_(carried(self._imatrix_bins))
            self._imatrix_sum.copy_(total(self._imatrix_bins))
        self._uncarried = 0

    def _share_with(self, module: torch.nn.Module) -> None:
        for name in _RAW:
            module.__dict__.pop(name, None)
            if self._imatrix_sum is not None:
                module.__dict__[name] = getattr(self, name)

    def gathers(self, module: torch.nn.Module) -> bool:
        """Whether it is attached to a module and sums its inputs."""
        return "_imatrix_hook" in module.__dict__

    @property
    def gathered(self) -> tuple[torch.Tensor, int] | None:
        """The sum of x^2 per column and the number of tokens; None without tokens."""
        if self._imatrix_sum is None or int(self._imatrix_count) == 0:
            return None
        self._sum_bins()
        return self._imatrix_sum.clone(), int(self._imatrix_count)

    def add_importance(self, squares: torch.Tensor, tokens: int) -> None:
        """Add importance gathered elsewhere, such as in an earlier run.

        squares: (columns,), the sum of x^2
        """
        if self._imatrix_sum is None:
            self._imatrix_sum = torch.zeros_like(squares, dtype=IMATRIX_PRECISION)
        if self._imatrix_sum.shape != squares.shape:
            raise ImportanceError(
                f"{self.label}: importance has {len(squares)} input channels, but the module has "
                f"{len(self._imatrix_sum)}"
            )
        self._imatrix_sum = self._imatrix_sum.clone()
        self._add(squares.to(self._imatrix_sum))
        self._imatrix_count = self._imatrix_count + tokens

    # -- weighting --------------------------------------------------------------------------

    def importance_for(self, observed: torch.Tensor) -> torch.Tensor | None:
        """Return E[x^2] per column, or its power, over the mean; it broadcasts to the weight.

        observed: (1, *qparam_shape, group_size), or blocks (1, rows, columns, h, w)
        """
        self._sum_bins()
        problem = self._problem(observed)
        self.fallback_reason = problem
        if problem is not None:
            self._go_without(problem)
            return None
        importance = self._importance().to(observed.device)
        if self.power != 1.0:
            importance = importance.pow(self.power)
        # in fp64, so that the order of columns does not change the last bit
        importance = importance / importance.double().mean().to(importance)
        if self._column_order is not None:
            importance = importance[self._column_order]
        if self.group_dims(observed) == 2:
            width = self.args.block_structure[1]
            padded = torch.nn.functional.pad(importance, (0, -len(importance) % width))
            return padded.reshape(1, 1, -1, 1, width)  # the same for every row of every block
        rows = 1  # broadcasts over the rows of the weight, but a block or a tensor spans them
        if self.args.strategy in ("block", "tensor") and self.observed_shape is not None:
            rows = self.observed_shape[:-1].numel()
        return flatten_for_calibration(importance.expand(rows, -1), "weight", self.args)

    def _go_without(self, problem: str) -> None:
        remedy = "gather importance over calibration data first"
        if self.strict:
            usable = self.base_name == "weight"
            kind = ImportanceError if usable else ImportanceUnsupported
            raise kind(f"{self.label}: {problem}; {remedy}, or set strict=False")
        if int(self._imatrix_count) == 0 and not self.needs_importance:
            return  # nothing was gathered, as in a run without data
        warnings.warn(
            f"{self.label}: {problem}, so every column has the same weight; {remedy}, "
            "or set strict=True to make this an error",
            ImportanceWarning,
            stacklevel=2,
        )

    def _importance(self) -> torch.Tensor:
        assert self._imatrix_sum is not None
        return self._imatrix_sum / self._imatrix_count.to(self._imatrix_sum)

    def _problem(self, observed: torch.Tensor) -> str | None:
        """Return why importance cannot be used, or None if it can."""
        if self.base_name != "weight":
            return "importance applies to the columns of a weight, not to an activation"
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
        self._sum_bins()
        if self._imatrix_sum is not None:
            self._bins()
        statistics = super().get_statistics()
        if self._imatrix_sum is None:
            del statistics["_imatrix_count"]
        return statistics

    def recomputed_statistics(self) -> tuple[str, ...]:
        return self._statistics  # depend on importance, so the weight must be observed again

    def combined(self, values: dict[str, torch.Tensor], states: int) -> None:
        super().combined(values, states)
        self._uncarried = int(states > 1)  # if so, the bins give the sum when it is used

    def reset(self) -> None:
        super().reset()
        self._imatrix_sum = None
        self._imatrix_count = torch.tensor(0, dtype=torch.int64)
        self._imatrix_bins = None
        self._uncarried = 0
        self.fallback_reason = None


def _remove_hook(module: torch.nn.Module) -> bool:
    hook = module.__dict__.pop("_imatrix_hook", None)
    if hook is not None:
        hook.remove()
    return hook is not None
