"""The first generation of the interface, in which a subclass defines only `calculate_qparams`.

    @Observer.register("half_range")
    class HalfRange(Observer):
        def calculate_qparams(self, observed, reduce_dims=None, tensor_id=None, global_scale=None):
            low, high = observed.amin(reduce_dims, True), observed.amax(reduce_dims, True)
            return calculate_qparams(low / 2, high / 2, self.quantization_args, global_scale)

The strategy cuts a value into slices; `calculate_qparams` is called for each, and the results are
assembled in the stored shape. Such a subclass keeps its own state between calls: it can observe in
order, but its state cannot be combined over ranks or files.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from steelyard.errors import NonFiniteError, OptionError, StrategyError, nearest
from steelyard.kernels.qparams import global_scale_of
from steelyard.kernels.scale_blocks import blocks_in, group_count
from steelyard.observers.helpers import count_tokens
from steelyard.observers.type_checks import describe_non_finite

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

    from steelyard.observers.base import Observer

__all__ = ["FirstGeneration", "Slice", "construct", "slices_of"]

_NEW, _OLD = "update_statistics_from_observed", "calculate_qparams"


@dataclass(frozen=True)
class Slice:
    """A slice of a value, for one call of `calculate_qparams`.

    reduce_dims: the dimensions that share a parameter; None for all
    tensor_id:   names the slice; None where there is only one
    place:       index of its parameters among those of the value
    """

    value: torch.Tensor
    reduce_dims: tuple[int, ...] | None
    tensor_id: int | None
    place: tuple[slice | int, ...]


def slices_of(
    value: torch.Tensor, base_name: str, args: QuantizationArgs
) -> tuple[tuple[int, ...], list[Slice]]:
    """Return the shape of a value's parameters, and its slices.

    =========  =====================  ===========================  ===========  ================
    kind       strategy               slice                        reduce_dims  parameters
    =========  =====================  ===========================  ===========  ================
    any        tensor                 the value                    None         (1,)
    weight     channel                the value                    (1,)         (out, 1)
    weight     group, tensor_group    (out, g), one per group      (1,)         (out, in / g)
    weight     block                  (h, w), one per block        None         (out / h, in / w)
    in/output  token                  the value                    (-1,)        (batch, seq, 1)
    in/output  group, tensor_group    (tokens, g), one per group   None         (hidden / g,)
    q, k, v    attn_head              the value                    all but 1    (heads, 1, 1)
    =========  =====================  ===========================  ===========  ================
    """
    strategy = args.strategy
    if strategy == "tensor":
        return (1,), [Slice(value, None, None, (slice(None),))]
    if strategy in ("channel", "token"):
        shape = (*value.shape[:-1], 1)
        return shape, [Slice(value, (value.ndim - 1,), None, (slice(None),))]
    if strategy == "attn_head":
        return (value.shape[1], 1, 1), [Slice(value, (0, 2, 3), None, (slice(None),))]
    if strategy == "block":
        return _blocks(value, *args.block_structure)
    count, size = group_count(args, value.shape), args.group_size
    if base_name == "weight":
        parts = enumerate(torch.split(value, size, -1))
        return (*value.shape[:-1], count), [Slice(x, (1,), i, (slice(None), i)) for i, x in parts]
    parts = enumerate(torch.split(value.reshape(-1, value.shape[-1]), size, -1))
    return (count,), [Slice(x, None, i, (slice(i, i + 1),)) for i, x in parts]


def _blocks(value: torch.Tensor, height: int, width: int) -> tuple[tuple[int, ...], list[Slice]]:
    rows, columns = blocks_in(value.shape[0], height), blocks_in(value.shape[1], width)
    found = [
        Slice(block, None, i * columns + j, (i, slice(j, j + 1)))
        for i, row in enumerate(torch.split(value, height, 0))
        for j, block in enumerate(torch.split(row, width, 1))
    ]
    return (rows, columns), found


class FirstGeneration:
    """Base of observers; the interface of the first generation."""

    calculates: ClassVar[bool] = False
    """Whether the class defines `calculate_qparams`, and so is of the first generation."""

    args: QuantizationArgs
    base_name: str
    num_observed_tokens: int
    absmax: torch.Tensor
    _scale: torch.Tensor
    _zero_point: torch.Tensor

    _weight_kept: Any = None
    """A weight whose parameters are recalculated if fused partners change the global scale."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next(c for c in cls.__mro__ if {_NEW, _OLD} & c.__dict__.keys())
        cls.calculates = _NEW not in owner.__dict__
        if cls.calculates:
            declared: Any = cls
            declared._statistics = ("_scale", "_zero_point", "absmax")
            declared._act_sync_dict = {}

    if TYPE_CHECKING:

        @property
        def label(self) -> str: ...

    @property
    def quantization_args(self) -> QuantizationArgs:
        """The first generation's name for `args`."""
        return self.args

    def record_observed_tokens(self, value: torch.Tensor) -> None:
        """Count the tokens of a value without observing it."""
        self.num_observed_tokens += count_tokens(value, self.base_name)

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: Sequence[int] | None = None,
        tensor_id: Any = None,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point of one slice.

        reduce_dims: the dimensions that share a parameter; None for all, which gives shape (1,)
        tensor_id:   names the slice; an observer that averages keeps one average per name
        """
        shared = range(observed.ndim) if reduce_dims is None else reduce_dims
        reduced = sorted(d % observed.ndim for d in shared)
        kept = [d for d in range(observed.ndim) if d not in reduced]
        sizes = [observed.shape[d] for d in kept] or [1]
        twin = self._twin(tensor_id)
        twin.update(observed.permute(*kept, *reduced).reshape(1, *sizes, -1), observed)
        scale, zero_point = twin.compute_qparams(global_scale)
        full = [n if d in kept else 1 for d, n in enumerate(observed.shape)] if kept else [1]
        return scale.reshape(full), zero_point.reshape(full)

    def _twin(self, tensor_id: Any) -> Observer:
        """Return the second-generation observer that handles one slice for this one."""
        twins: dict[Any, Observer] = self.__dict__.setdefault("_twins", {})
        if tensor_id not in twins:
            classes: Any = type(self).__mro__
            kind = next(c for c in classes if not c.calculates)
            twins[tensor_id] = kind(self.base_name, self.args)
            twins[tensor_id].module_name = f"slice {tensor_id} for {self.label}"
        return twins[tensor_id]

    def observe_slices(self, observed: torch.Tensor) -> None:
        """Compute the parameters of a value with `calculate_qparams`."""
        largest = observed.abs().amax()
        if not bool(torch.isfinite(largest)):
            raise NonFiniteError(describe_non_finite(observed, self.label))
        if self.base_name != "weight" and "absmax" in self.__dict__:
            largest = torch.maximum(largest, self.absmax)
        self.absmax = largest
        grouped = self.args.strategy == "tensor_group"
        global_scale = global_scale_of(largest) if grouped else None
        self._scale, self._zero_point = self._calculated(observed, global_scale)
        self._weight_kept = observed if grouped and self.base_name == "weight" else None

    def calculated(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parameters, given the global scale that will be stored with them."""
        if self._weight_kept is None or torch.equal(
            global_scale_of(self.absmax), _some(global_scale)
        ):
            return self._scale, self._zero_point
        return self._calculated(self._weight_kept, global_scale)

    def _calculated(
        self, observed: torch.Tensor, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape, slices = slices_of(observed, self.base_name, self.args)
        scale = torch.empty(shape, dtype=observed.dtype, device=observed.device)
        zero_point = torch.empty(shape, dtype=self.args.zp_dtype, device=observed.device)
        for each in slices:
            found = self.calculate_qparams(
                each.value,
                reduce_dims=each.reduce_dims,
                tensor_id=each.tensor_id,
                global_scale=global_scale,
            )
            for whole, part, name in zip(
                (scale, zero_point), found, ("scale", "zero point"), strict=True
            ):
                place = whole[each.place]
                if part.numel() != place.numel():
                    raise StrategyError(
                        f"{self.label}: calculate_qparams returned a {name} of shape "
                        f"{tuple(part.shape)} for a slice of shape {tuple(each.value.shape)} with "
                        f"reduce_dims={each.reduce_dims}; expected {place.numel()} values"
                    )
                whole[each.place] = part.reshape(place.shape).to(whole.dtype)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise NonFiniteError(
                f"{self.label}: calculate_qparams returned scales that are not finite or not above "
                "zero; a scale is a divisor"
            )
        return scale, zero_point


def construct(
    kind: type[Observer],
    base_name: str | None = None,
    args: QuantizationArgs | None = None,
    quantization_args: QuantizationArgs | None = None,
    **options: Any,
) -> Observer:
    """Build an observer, even if its `__init__` takes only QuantizationArgs and options."""
    named: dict[str, Any] = {
        "base_name": base_name,
        "args": args,
        "quantization_args": quantization_args,
    }
    given = {name: value for name, value in named.items() if value is not None}
    known = _own_options(cast(Any, kind))
    if known is None:
        return kind(**given, **options)
    found: Any = args or quantization_args
    options = {**((found and found.observer_kwargs) or {}), **options}
    for name in options:
        if name not in known:
            raise OptionError(f"{kind.__name__}: unknown option {name!r}: {nearest(name, known)}")
    made: Any = kind.__new__(kind)
    made.__dict__["_base_name"] = base_name or "weight"  # its own __init__ does not take it
    made.__init__(found, **options)
    observer: Observer = made
    return observer


@lru_cache(maxsize=256)
def _own_options(kind: Any) -> list[str] | None:
    """Return the options of `__init__` after QuantizationArgs; None if it takes base_name."""
    parameters = inspect.signature(kind.__init__).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds or "base_name" in parameters:
        return None
    return list(parameters)[2:]


def _some(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value
