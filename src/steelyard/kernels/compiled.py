"""The compiled kernels behind the reference's signatures.

Values are passed without a copy, as a view of five dimensions (observations, two of parameters,
rows and columns of a group).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from steelyard.kernels.backend import extension, instruction_set
from steelyard.kernels.rounding import minifloat, quantized_range

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = [
    "SCALE_TYPES",
    "add_counts",
    "add_products",
    "five_dimensions",
    "format_of",
    "has_products",
    "native",
    "optimal_qparams",
    "pack",
    "qparams_from_range",
    "range_of",
    "search_range",
    "sum_of_squares",
    "supports",
    "threads",
]

# as in native/api.h
SCALE_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.uint8: 4,
}
_WHOLE_SCALES = (torch.float32, torch.float16, torch.bfloat16)  # the others are one-byte codes
_PARALLEL_FROM = 1 << 16  # elements; below that, starting threads costs more than it saves


def format_of(
    args: QuantizationArgs, scale_dtype: torch.dtype, global_scale: torch.Tensor | None = None
) -> Any:
    """Describe a quantized type, and how its scales are stored, to the extension."""
    qmin, qmax = quantized_range(args)
    mantissa, min_exponent = (0, 0) if args.type == "int" else minifloat(args.num_bits)
    # compressed-tensors rounds an MX range to a power of two with the element's mantissa, but
    # with fp4's for fp8
    rounding_mantissa = 3 if args.num_bits == 6 else 1
    return native().Format(
        is_int=args.type == "int",
        symmetric=args.symmetric,
        qmin=qmin,
        qmax=qmax,
        mantissa=mantissa,
        min_exponent=min_exponent,
        scale=SCALE_TYPES[scale_dtype],
        global_scale=None if global_scale is None else float(global_scale),
        mx_offset=8 if args.num_bits == 8 else 2,
        mx_round_bit=1 << (23 - rounding_mantissa - 1),
    )


def supports(args: QuantizationArgs, scale_dtype: torch.dtype) -> bool:
    """Whether the compiled searches support this type; the reference runs the others."""
    return scale_dtype in SCALE_TYPES and (args.type == "int" or args.symmetric)


def range_of(observed: torch.Tensor, group_dims: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = (torch.empty(_qparam_shape(observed, group_dims)) for _ in range(2))
    values = five_dimensions(observed, group_dims)
    native().range(values, low, high, instruction_set(), threads(observed))
    return low, high


def qparams_from_range(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    global_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = min_vals.shape or (1,)
    scale = torch.empty(shape, dtype=scale_dtype if scale_dtype in _WHOLE_SCALES else torch.float32)
    zero_point = None if args.symmetric else torch.empty(shape)
    native().qparams(
        min_vals.detach().contiguous(),
        max_vals.detach().contiguous(),
        format_of(args, scale_dtype, global_scale),
        scale,
        zero_point,
        instruction_set(),
        threads(min_vals),
    )
    if zero_point is None:
        return scale, torch.zeros(shape, dtype=args.zp_dtype)
    return scale, zero_point.to(args.zp_dtype)


def search_range(
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    norm: float,
    patience: int,
    importance: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    observed_range: tuple[torch.Tensor, torch.Tensor],
    group_dims: int = 1,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    min_vals, max_vals = (t.contiguous() for t in observed_range)
    best_min, best_max = min_vals, max_vals
    if not in_place:
        best_min, best_max = torch.empty_like(min_vals), torch.empty_like(max_vals)
    values, weights = (
        five_dimensions(observed, group_dims),
        _weights(importance, observed, group_dims),
    )
    described = format_of(args, scale_dtype, global_scale)
    native().search(
        values,
        described,
        min_vals,
        max_vals,
        list(factors),
        norm,
        patience,
        weights,
        best_min,
        best_max,
        instruction_set(),
        threads(observed),
    )
    return best_min, best_max


def optimal_qparams(
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    importance: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    observed_range: tuple[torch.Tensor, torch.Tensor],
    negative_scales: bool = False,
    group_dims: int = 1,
    norm: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    min_vals, max_vals = (t.contiguous() for t in observed_range)
    scale = torch.empty_like(min_vals)
    zero_point = None if args.symmetric else torch.empty_like(min_vals)
    native().optimal(
        five_dimensions(observed, group_dims),
        format_of(args, scale_dtype, global_scale),
        min_vals,
        max_vals,
        _weights(importance, observed, group_dims),
        norm,
        negative_scales,
        scale,
        zero_point,
        instruction_set(),
        threads(observed),
    )
    return scale, zero_point


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    sums = torch.empty(x.shape[-1])
    rows = x.detach().reshape(-1, 1, 1, 1, x.shape[-1])
    native().sum_squares(rows, sums, instruction_set(), threads(x))
    return sums


def add_counts(
    observed: torch.Tensor,
    histogram: torch.Tensor,
    group_dims: int = 1,
    rows: torch.Tensor | None = None,
) -> None:
    """Add to a histogram in place; `kernels.bin_counts` defines it."""
    values = five_dimensions(observed, group_dims)
    native().histogram(values, rows, histogram, instruction_set(), threads(observed))


def pack(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None,
    block: tuple[int, int],
    layout: int,
    round_quotient: bool,
    out: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> None:
    """Fill `out`, bytes of shape (rows, bytes per row), and `errors`, fp64 of shape (rows,)."""
    native().pack(
        weight.detach(),
        scale.detach().to(torch.float32).contiguous(),
        None if zero_point is None else zero_point.to(torch.float32).contiguous(),
        format_of(args, torch.float32, global_scale),
        *block,
        args.num_bits,
        layout,
        round_quotient,
        out,
        errors,
        instruction_set(),
        threads(weight),
    )


def has_products() -> bool:
    """Whether the instruction set has a product of matrices; torch's is faster on the baseline."""
    return instruction_set() != "baseline"


def add_products(
    left: torch.Tensor | None,
    right: torch.Tensor,
    slabs: Sequence[torch.Tensor],
    starts: Sequence[int],
    fresh: bool,
) -> None:
    """Add left^T right to slabs; without `left`, right^T right on and above the diagonal.

    fresh: slabs hold nothing yet
    """
    rows = None if left is None else _by_token(left)
    native().products(rows, _by_token(right), list(slabs), list(starts), fresh, instruction_set())


def _by_token(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x if x.stride(-1) == 1 else x.contiguous()


def native() -> Any:
    """Return the extension; raise with the reason if it cannot be loaded."""
    module, problem = extension()
    if module is None:
        raise ImportError(problem)
    return module


def threads(values: torch.Tensor) -> int:
    """Return the number of threads for a kernel on `values`; 1 for small tensors."""
    return torch.get_num_threads() if values.numel() >= _PARALLEL_FROM else 1


def _qparam_shape(observed: torch.Tensor, group_dims: int) -> tuple[int, ...]:
    return tuple(observed.shape[1:-group_dims])


def five_dimensions(
    tensor: torch.Tensor, group_dims: int, like: torch.Tensor | None = None
) -> torch.Tensor:
    """View (num_observations, *qparam_shape, *group) as (n, q1, q2, rows, columns).

    like: a tensor that `tensor` broadcasts to; its shape decides which dimensions stay separate
    """
    view = tensor.detach()
    shape = list((tensor if like is None else like).shape)
    if group_dims == 1:
        view = view.unsqueeze(-2)
        shape.insert(-1, 1)
    inner = range(1, len(shape) - 2)
    single = [d for d in inner if shape[d] == 1]
    view = view.squeeze(tuple(single))
    while view.ndim > 5:  # more than two dimensions of parameters: flatten the outer ones
        view = view.flatten(1, 2)
    while view.ndim < 5:
        view = view.unsqueeze(1)
    return view


def _weights(
    importance: torch.Tensor | None, observed: torch.Tensor, group_dims: int
) -> torch.Tensor | None:
    if importance is None:
        return None
    return five_dimensions(importance.to(torch.float32), group_dims, observed)
