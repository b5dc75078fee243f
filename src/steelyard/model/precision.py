"""The type that a model computes in, which may differ from the stored type of its weights."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from steelyard.distributed.packing import sendable
from steelyard.kernels.masked_attention import has_attention
from steelyard.model.rounded_weight import rounded_weight

__all__ = [
    "FORWARDS",
    "Forward",
    "computing_in",
    "forward_dtype",
    "is_plain_linear",
    "multiplies_in_bf16",
    "multiplying_in",
    "product_dtype",
    "rounded_once",
    "speed",
]

_CLEAR = 1.5  # times faster; below, a busy machine could measure otherwise next time
_ROWS, _WIDTH = 64, 512  # of the matrices to measure with

FORWARDS = ("auto", "fp32", "stored")
"""Values of STEELYARD_FORWARD."""


@contextlib.contextmanager
def computing_in(
    module: Module,
    dtype: torch.dtype | None,
    scales: bool = False,
    without: Iterable[Module] = (),
) -> Iterator[None]:
    """Cast the parameters of `module` to a wider type inside the context, and restore them after.

    dtype:   None casts nothing
    scales:  cast quantization parameters too
    without: modules within it to leave uncast
    """
    excluded = {parameter for each in without for parameter in each.parameters()}
    kept: list[tuple[Parameter, torch.Tensor]] = []
    try:
        for name, parameter in module.named_parameters() if dtype is not None else ():
            assert dtype is not None
            real = parameter.device.type != "meta" and parameter.is_floating_point()
            fixed = name.endswith(("_scale", "_zero_point")) and not scales
            keep = fixed or parameter in excluded
            if real and parameter.dtype.itemsize < dtype.itemsize and not keep:
                kept.append((parameter, parameter.data))
                parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


class _Bf16Linear(Linear):
    """A Linear layer whose product is computed in bf16; inputs and outputs keep their type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (None if t is None else t.bfloat16() for t in (self.weight, self.bias))
        return linear(x.bfloat16(), weight, bias).to(x.dtype)


def is_plain_linear(module: Module) -> bool:
    """Whether a module is a plain Linear; routers of some classes subclass it."""
    return isinstance(module, Linear) and type(module).forward in _PLAIN


_PLAIN = (Linear.forward, _Bf16Linear.forward)


def multiplies_in_bf16(module: Module) -> bool:
    """Whether a layer right below an fp32 module computes its product in bf16 (multiplying_in)."""
    return any(type(each) is _Bf16Linear for each in module.children())


def product_dtype(layer: Linear, dtype: torch.dtype) -> torch.dtype:
    """Return the type that a layer multiplies inputs of a type in (multiplying_in)."""
    return torch.bfloat16 if type(layer) is _Bf16Linear else dtype


@contextlib.contextmanager
def multiplying_in(module: Module, products: torch.dtype | None) -> Iterator[None]:
    """Compute the products of Linear layers in bf16 inside the context, or in their own type.

    Norms, softmax and the residual stream keep the type of the model. The class of a layer is
    replaced, so that threads and stages that wait see the same; copies made inside keep it.

    products: torch.bfloat16, or None for the type of the weights
    """
    before, after = (Linear, _Bf16Linear) if products is not None else (_Bf16Linear, Linear)
    replaced = [each for each in module.modules() if type(each) is before]
    try:
        for each in replaced:
            each.__class__ = after
        yield
    finally:
        for each in replaced:
            each.__class__ = before


@contextlib.contextmanager
def rounded_once(modules: Iterable[Module], dtype: torch.dtype | None = None) -> Iterator[None]:
    """Replace the weights of `modules` by their quantized values inside the context.

    A call then rounds and changes nothing, so several threads can call a module at once.

    dtype: a wider type that each is cast to before, with its scales; None casts nothing. Only the
           stored weight is kept, not the wider one before it was rounded.
    """
    given: list[Any] = [module for module in modules if "weight" in module._parameters]
    weighed = [module for module in given if _weight_args(module) is not None]
    wider = list(_wider([each.weight.data for each in weighed], dtype))
    kept = [(each, each.weight.data, each.quantization_status) for each in weighed]
    cast = contextlib.ExitStack()
    try:
        for each in given:
            if each not in weighed:
                cast.enter_context(computing_in(each, dtype))
        for each, wide in zip(weighed, wider, strict=True):
            if wide is not None:
                each.weight.data = wide.copy_(each.weight.data)
            cast.enter_context(computing_in(each, dtype, scales=True))
        for each, wide in zip(weighed, wider, strict=True):
            rounded = rounded_weight(each)
            each.weight.data = rounded if wide is None else wide.copy_(rounded)
            each.quantization_status = QuantizationStatus.COMPRESSED  # no rounding in forward
        yield
    finally:
        for each, data, status in kept:
            each.weight.data = data
            each.quantization_status = status
        cast.close()


def _weight_args(module: Any) -> Any:
    """Return how the weight of a module is quantized; None if it is not."""
    scheme = module.quantization_scheme
    return None if scheme is None else scheme.weights


def _wider(
    weights: Sequence[torch.Tensor], dtype: torch.dtype | None
) -> Iterator[torch.Tensor | None]:
    """Yield memory for each weight in a wider type; None for those that are not cast.

    It is allocated at once. Between weights that are allocated one by one, malloc leaves holes of
    freed temporaries that the next weight does not fit into: as much again for hundreds of experts.
    """
    cast = [dtype is not None and w.dtype.itemsize < dtype.itemsize for w in weights]
    sizes: dict[torch.device, list[int]] = {}
    for weight in (w for w, is_cast in zip(weights, cast, strict=True) if is_cast):
        sizes.setdefault(weight.device, []).append(weight.numel())
    parts = {
        device: iter(torch.split(torch.empty(sum(each), dtype=dtype, device=device), each))
        for device, each in sizes.items()
    }
    for weight, is_cast in zip(weights, cast, strict=True):
        yield next(parts[weight.device]).view(weight.shape) if is_cast else None


@sendable
@dataclass(frozen=True)
class Forward:
    """The type that batches are computed in: that of the weights, or fp32.

    reason:   what decided it, for the plan; empty where there is no choice
    narrowed: whether products of fp32 layers are computed in bf16
    """

    wide: bool = False
    reason: str = ""
    narrowed: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """fp32, or None for the type of the weights."""
        return torch.float32 if self.wide else None

    @property
    def products(self) -> torch.dtype | None:
        """The type of the products of Linear layers, if it is another."""
        return torch.bfloat16 if self.narrowed else None

    def multiplied(self, value: Any) -> Any:
        """Return the input of Linear layers as they multiply it; other values as they are."""
        is_input = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.bfloat16() if self.narrowed and is_input else value


def forward_dtype(
    stored: torch.dtype, device: torch.device, compares: bool = False, precisely: bool | None = None
) -> Forward:
    """Choose the type of the forward pass: that of the weights, or fp32 if it is faster or needed.

    Where bf16 is faster, the Linear layers of an fp32 model multiply in it.

    On a CPU, a measured product of two matrices decides if one type is clearly faster, else the
    flags of the processor: so every run on a machine decides alike, whatever else it does. The
    environment variable STEELYARD_FORWARD forces `fp32`, or `stored`.

    compares:  whether an algorithm compares outputs of a block, whose differences are small
    precisely: whether products in bf16 could hide such differences; None for the same
    """
    asked = os.environ.get("STEELYARD_FORWARD", "auto")
    if asked not in FORWARDS:
        expected = ", ".join(FORWARDS)
        raise ValueError(f"STEELYARD_FORWARD must be one of {expected}, got {asked!r}")
    if device.type != "cpu":
        return Forward()
    precisely = compares if precisely is None else precisely
    if stored.itemsize >= torch.float32.itemsize:
        narrows = stored == torch.float32 and asked == "auto" and not precisely
        return _narrowed() if narrows else Forward()
    name = str(stored).removeprefix("torch.")
    if asked != "auto":
        wide, reason = asked == "fp32", "as STEELYARD_FORWARD asks"
    elif compares:
        if stored == torch.bfloat16 and not precisely and (narrow := _narrowed()).narrowed:
            return replace(narrow, wide=True)
        wide, reason = True, "since an algorithm compares outputs"
    else:
        fast = _fast(stored)
        wide, reason = fast is None, fast or f"since this CPU is slow in {name}"
    return Forward(wide, f"batches are computed in {'float32' if wide else name}, {reason}")


def _narrowed() -> Forward:
    """Return how layers are computed whose residual stream is in fp32."""
    fast = _fast(torch.bfloat16)
    if fast is None:
        return Forward()
    also = " and attention" if has_attention() else ""
    reason = f"batches are computed in float32, products of Linear layers{also} in bfloat16, {fast}"
    return Forward(False, reason, narrowed=True)


def _fast(stored: torch.dtype) -> str | None:
    """Return why a 16-bit type is faster than fp32 on this CPU; None if it is not."""
    flag, gain = _multiplies_bf16() if stored == torch.bfloat16 else None, speed(stored)
    if gain < 1 if max(gain, 1 / gain) >= _CLEAR else flag is None:
        return None
    if flag is None:
        return f"which this CPU multiplies {_CLEAR:g} times faster"
    return f"which this CPU multiplies ({flag})"


def _multiplies_bf16() -> str | None:
    """Return the processor's flag for fast products of bf16, if torch's library uses them."""
    usable = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    for flag in ("amx_tile", "avx512_bf16") if usable() else ():
        if getattr(torch.cpu, f"_is_{flag}_supported", lambda: False)():
            return flag
    return None


@functools.cache
def speed(stored: torch.dtype) -> float:
    """Return how many times faster this CPU multiplies matrices in a type than in fp32.

    Measured once, in some ten milliseconds of CPU time; the best of several tries, which other
    processes disturb least.
    """
    seconds: dict[torch.dtype, float] = {}
    for dtype in (stored, torch.float32) * 6:  # in turns, so that both have the same neighbours
        x, weight = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
        started = time.thread_time()  # a process that has to wait would choose by chance
        torch.nn.functional.linear(x, weight)
        taken = time.thread_time() - started
        seconds[dtype] = min(taken, seconds.get(dtype, taken))
    return seconds[torch.float32] / seconds[stored]
