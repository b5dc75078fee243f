"""The observer: a statistic that can be observed, merged, computed and reset.

Calling an observer updates its statistics; `get_qparams` computes parameters from them, any number
of times, and changes nothing. A subclass writes `update_statistics_from_observed`, which turns one
tensor in the canonical shape into `self.min_vals` and `self.max_vals`; or, as in the first
generation of the interface, `calculate_qparams`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from compressed_tensors import InternalModule
from compressed_tensors.quantization import QuantizationArgs

from steelyard.errors import NonFiniteError, StrategyError
from steelyard.kernels.range import range_of
from steelyard.observers.first_generation import FirstGeneration, construct
from steelyard.observers.helpers import (
    check_strategy,
    flatten_for_calibration,
    group_order,
    view_blocks,
)
from steelyard.observers.linked import fuse
from steelyard.observers.mergeable import MergeableStatistics
from steelyard.observers.observer_options import ObserverOptions, check_headroom, parse_options
from steelyard.observers.parameters import ComputesQParams, QParamsDict
from steelyard.observers.type_checks import as_floats, check_type, describe_non_finite
from steelyard.registry import Registry

__all__ = ["Observer", "QParamsDict"]

Self = TypeVar("Self", bound="Observer")
Method = TypeVar("Method", bound=Callable[..., None])
ObserverClass = TypeVar("ObserverClass", bound="type[Observer]")


def reads_blocks(method: Method) -> Method:
    """Mark an `update_statistics_from_observed` that takes 2-D blocks unflattened, as a view.

    Flattening a block copies the weight. A marked method gets (1, out / h, in / w, h, w) for
    strategy `block`, and must pass `self.group_dims(observed)` on to the kernels.
    """
    method.reads_blocks = True  # type: ignore[attr-defined]
    return method


class Observer(
    FirstGeneration,
    ComputesQParams,
    MergeableStatistics,
    InternalModule,  # type: ignore[misc]  # which is untyped
):
    """Base of all observers.

    base_name: weight | input | output | q | k | v
    args:      how the value will be quantized; never modified

    Both generations of the interface work::

        qparams = observer(x).get_qparams()
        scale, zero_point = observer(x)
    """

    registry: ClassVar[Registry[type[Observer]]] = Registry("observer")

    Options: ClassVar[type[ObserverOptions] | None] = None
    """The options this observer declares; None leaves `observer_kwargs` unchecked."""

    suits: ClassVar[str] = "weights and activations"
    """Values that it is meant for, as the documentation lists them."""

    seconds_per_weight: ClassVar[float] = 2e-9
    """Time to find the scales of one weight in one thread, for the plan's estimate."""

    min_vals: torch.Tensor
    max_vals: torch.Tensor

    def __init__(
        self,
        base_name: str | QuantizationArgs = "weight",
        args: QuantizationArgs | None = None,
        *,
        quantization_args: QuantizationArgs | None = None,
        **observer_kwargs: Any,
    ) -> None:
        given_name = self.__dict__.pop("_base_name", None)  # by `construct`
        super().__init__()
        first = None
        if not isinstance(base_name, str):  # the first generation took only its QuantizationArgs
            base_name, first = "weight", base_name
        base_name = given_name or base_name
        forms: list[Any] = [a for a in (first, args, quantization_args) if a is not None]
        if len(forms) != 1:
            raise TypeError(
                f"{type(self).__name__} takes its QuantizationArgs once, "
                "as args or as quantization_args"
            )
        given = forms[0]
        options = {**(given.observer_kwargs or {}), **observer_kwargs}
        self.base_name = base_name
        self.args: QuantizationArgs = given.model_copy(update={"observer_kwargs": options})
        check_strategy(base_name, self.args)
        check_type(self.args)
        self.options: Any = (
            None
            if self.Options is None
            else parse_options(self.Options, options, type(self).__name__)
        )
        check_headroom(self.options, base_name, self.args)
        self.module_name: str | None = None
        self.observed_dtype: torch.dtype | None = None
        self.observed_shape: torch.Size | None = None
        self.num_observed_tokens = 0
        self.num_updates = 0
        self._fused_observers: set[Observer] = set()
        self._column_order: torch.Tensor | None = None
        self._checked: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    # -- registry ---------------------------------------------------------------------------

    @classmethod
    def register(cls, name: str) -> Callable[[ObserverClass], ObserverClass]:
        """Return a class decorator that registers an observer as `name`."""
        return Observer.registry.register(name)  # type: ignore[return-value]

    @classmethod
    def load_from_registry(cls, name: str, **kwargs: Any) -> Observer:
        """Build the observer called `name`; keyword arguments are its constructor's."""
        return construct(cls.registry.get(name), **kwargs)

    @classmethod
    def get_value_from_registry(cls, name: str) -> type[Observer]:
        return cls.registry.get(name)

    @classmethod
    def registered_names(cls) -> list[str]:
        return cls.registry.names()

    # -- observing --------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self: Self, observed: torch.Tensor, g_idx: torch.Tensor | None = None) -> Self:
        """Update the statistics from one value.

        observed: see `flatten_for_calibration` for the shape; an empty tensor changes nothing
        g_idx:    (columns,), the group of each column of a weight quantized with activation order
        """
        if observed.numel() == 0:
            return self
        observed = as_floats(observed, self.label)
        order = None
        if g_idx is not None:
            order = group_order(g_idx, observed.shape[-1], self.base_name, self.args)
            observed = observed if order is None else observed[..., order]
        if self.calculates:
            self.observe_slices(observed)
            self.observed_dtype, self.observed_shape = observed.dtype, observed.shape
        else:
            in_place = getattr(self.update_statistics_from_observed, "reads_blocks", False)
            if in_place and self.args.strategy == "block":
                flat = view_blocks(observed, self.args)
            else:
                flat = flatten_for_calibration(observed, self.base_name, self.args)
            self.update(flat, observed, order)
        self.num_updates += 1
        self.record_observed_tokens(observed)
        return self

    def update(
        self, flat: torch.Tensor, source: torch.Tensor, order: torch.Tensor | None = None
    ) -> None:
        """Update the statistics from a value in the canonical shape; a failure changes nothing.

        source: the value before it was brought to that shape
        order:  permutation of the columns that makes groups contiguous
        """
        self._check_shape(flat)
        self._checked = (flat, self.range_of(flat, source=source))
        before = self._column_order, self.observed_dtype, self.observed_shape
        self._column_order, self.observed_dtype, self.observed_shape = (
            order,
            source.dtype,
            source.shape,
        )
        try:
            self.update_statistics_from_observed(flat)
        except BaseException:
            self._column_order, self.observed_dtype, self.observed_shape = before
            raise
        finally:
            self._checked = None

    @abstractmethod
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Update `self.min_vals` and `self.max_vals`; this is what a subclass writes.

        observed: (num_observations, *qparam_shape, group_size), all values finite
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define update_statistics_from_observed, which sets "
            "self.min_vals and self.max_vals"
        )

    def range_of(
        self, observed: torch.Tensor, source: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return minimum and maximum per parameter, (*qparam_shape) each; refuse NaN and infinity.

        observed: (num_observations, *qparam_shape, group_size)
        source:   the value before it was padded to that shape, for the message
        """
        if self._checked is not None and self._checked[0] is observed:
            return self._checked[1]
        low, high = self.extremes(observed)
        if not bool(torch.isfinite(low.amin()) & torch.isfinite(high.amax())):
            value = observed if source is None else source
            raise NonFiniteError(describe_non_finite(value, self.label))
        return low, high

    def extremes(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return minimum and maximum per parameter; a subclass may keep more than that."""
        return range_of(observed, self.group_dims(observed))

    def group_dims(self, observed: torch.Tensor) -> int:
        """Return how many trailing dimensions a group has: 2 for blocks that were not flattened."""
        return 2 if self.args.strategy == "block" and observed.ndim == 5 else 1

    # -- statistics -------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._column_order = None
        self._weight_kept = None
        self.__dict__.pop("_twins", None)

    def unserved(self) -> str | None:
        """Return why the computed scale cannot serve all tokens; None if it does or is unknown."""
        return None

    # -- lifecycle --------------------------------------------------------------------------

    def attach(self, module: torch.nn.Module) -> None:
        """Called when the observer is added to a module; a subclass may register hooks."""

    def detach(self, module: torch.nn.Module) -> None:
        """Called before the observer is removed from a module; undoes `attach`."""

    @staticmethod
    def fuse(observers: Iterable[Observer]) -> None:
        """Link observers of layers that the server fuses, so that they share their scales."""
        fuse(observers)

    # -- names and checks -------------------------------------------------------------------

    @property
    def label(self) -> str:
        """Name of the observed value, for messages."""
        where = f" of {self.module_name}" if self.module_name else ""
        return f"{self.base_name}{where} ({type(self).__name__})"

    def _check_shape(self, flat: torch.Tensor) -> None:
        """Reject a value of another shape, if the observer accumulates."""
        if not (self._act_sync_dict and self.has_statistics):
            return
        expected = tuple(self.min_vals.shape)
        got = tuple(flat.shape[1 : -self.group_dims(flat)])
        if expected != got:
            raise StrategyError(
                f"{self.label} has parameters of shape {expected}, but this value needs {got}: "
                "use one observer per tensor; reset() it, or use a memoryless one"
            )
