"""Checks of an observer's type and values: types that no format stores, tensors it cannot use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.errors import StrategyError
from steelyard.kernels.qparams import is_mx
from steelyard.kernels.rounding import quantized_range

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["as_floats", "check_type", "describe_non_finite"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_type(args: QuantizationArgs) -> None:
    """Reject types that no format stores, before anything is observed."""
    if args.type == "int" and not 2 <= args.num_bits <= 8:
        raise StrategyError(f"integers must have 2 to 8 bits, got {args.num_bits}")
    if args.type == "float":
        try:
            quantized_range(args)
        except NotImplementedError:
            raise StrategyError(f"floats must have 4 or 8 bits, got {args.num_bits}") from None
        if not args.symmetric and (args.num_bits != 8 or is_mx(args)):
            raise StrategyError(
                f"a {args.num_bits}-bit float has no zero point here: set symmetric=True"
            )
    if args.scale_dtype not in (None, torch.uint8, torch.float8_e4m3fn, *_FLOATS):
        raise StrategyError(
            f"scales are stored as floats, E4M3 or power-of-two bytes, not as {args.scale_dtype}"
        )
    in_groups = args.strategy == "group" and args.group_size == 32
    if args.scale_dtype == torch.uint8 and not (is_mx(args) and in_groups):
        raise StrategyError(
            "scale_dtype uint8 means power-of-two scales, which belong to floats with strategy "
            "'group' and group_size 32"
        )


def as_floats(observed: torch.Tensor, label: str) -> torch.Tensor:
    """Return a value as floats; converts integers and rejects codes of floats."""
    if observed.ndim == 0:
        raise StrategyError(f"{label}: cannot observe a single number; give it dimensions first")
    if observed.dtype in _INTEGERS:
        wide = observed.dtype.itemsize > 2  # beyond what fp32 holds exactly
        return observed.to(torch.float64 if wide else torch.float32)
    if observed.dtype not in _FLOATS:
        raise StrategyError(
            f"{label}: cannot observe {observed.dtype}; dequantize it to bf16, fp16 or fp32 first"
        )
    return observed


def describe_non_finite(observed: torch.Tensor, label: str) -> str:
    nans = int(torch.isnan(observed).sum())
    infinities = int(torch.isinf(observed).sum())
    kinds = [f"{nans} NaN"] * bool(nans) + [f"{infinities} infinite"] * bool(infinities)
    first = torch.isfinite(observed).logical_not().nonzero()[:1].flatten().tolist()
    return (
        f"{label} holds {' and '.join(kinds)} of {observed.numel()} values, the first at {first}: "
        "repair the source (an overflow in fp16, or a damaged file, is the usual cause)"
    )
