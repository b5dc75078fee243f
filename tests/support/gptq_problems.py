"""Weights, Hessians and parameters that the tests of GPTQ share."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from steelyard.kernels.gptq_rounding import GPTQResult, solve
from steelyard.kernels.pack import quantize_and_pack
from steelyard.observers import Observer


def _args(bits: int, kind: str, symmetric: bool, strategy: str) -> QuantizationArgs:
    shape: dict[str, Any] = {"group": {"group_size": 16}, "block": {"block_structure": [5, 24]}}
    return QuantizationArgs(
        num_bits=bits, type=kind, symmetric=symmetric, strategy=strategy, **shape.get(strategy, {})
    )


FORMATS: dict[str, QuantizationArgs] = {
    **{f"int{bits}_group": _args(bits, "int", True, "group") for bits in range(2, 9)},
    **{f"int{bits}_asym_group": _args(bits, "int", False, "group") for bits in range(2, 9)},
    "int4_tensor": _args(4, "int", True, "tensor"),
    "int4_asym_channel": _args(4, "int", False, "channel"),
    "int8_channel": _args(8, "int", True, "channel"),
    "int8_asym_tensor": _args(8, "int", False, "tensor"),
    "int8_asym_block": _args(8, "int", False, "block"),
    "fp8_tensor": _args(8, "float", True, "tensor"),
    "fp8_channel": _args(8, "float", True, "channel"),
    "fp8_block": _args(8, "float", True, "block"),
    **{
        name: preset_name_to_scheme(name, ["Linear"]).weights
        for name in ("NVFP4A16", "MXFP4A16", "MXFP8A16")
    },
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight_of(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05
    return x.to(dtype)


def hessian_of(columns: int, tokens: int = 0, rank: int = 4, seed: int = 1) -> torch.Tensor:
    """Return the Hessian of inputs that share a few directions and differ in size."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens or 4 * columns
    shared = torch.randn(tokens, rank, generator=generator)
    x = shared @ torch.randn(rank, columns, generator=generator)
    x = x + torch.randn(tokens, columns, generator=generator)
    x = x * torch.rand(columns, generator=generator).add(0.2)
    return (x.t() @ x).contiguous()


def qparams_of(weight: torch.Tensor, args: QuantizationArgs) -> tuple[Any, Any, Any]:
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    q = observer(weight).get_qparams()
    return q["scale"], q["zero_point"], q["global_scale"]


def solved(
    weight: torch.Tensor, hessian: torch.Tensor, args: QuantizationArgs, **options: Any
) -> GPTQResult:
    scale, zero_point, global_scale = qparams_of(weight, args)
    return solve(weight, hessian, scale, zero_point, args, global_scale, **options)


def packed(weight: torch.Tensor, like: torch.Tensor, args: QuantizationArgs, **options: Any):
    """Return the codes of a weight under the parameters of another."""
    scale, zero_point, global_scale = qparams_of(like, args)
    return quantize_and_pack(weight, scale, zero_point, args, global_scale, packed=False, **options)


def decoded(codes: torch.Tensor, like: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return the values of codes, float64 before they are rounded to the type of `like`."""
    scale, zero_point, global_scale = qparams_of(like, args)
    if codes.dtype == torch.uint8:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
        values = grid[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    else:
        values = codes.double()
    rows, columns = like.shape
    height, width = rows, columns
    if args.strategy == "block":
        height, width = args.block_structure
    elif args.strategy != "tensor":
        height, width = 1, args.group_size or columns

    def wide(t: torch.Tensor) -> torch.Tensor:
        grid = t.double().reshape(-(-rows // height), -(-columns // width))
        return grid[torch.arange(rows) // height][:, torch.arange(columns) // width]

    effective = wide(scale)
    if global_scale is not None:
        effective = (effective.float() / global_scale).double()
    if not args.symmetric:
        values = values - wide(zero_point)
    return (values * effective).to(like.dtype)


def nearest(weight: torch.Tensor, args: QuantizationArgs, **options: Any) -> torch.Tensor:
    return decoded(packed(weight, weight, args, **options), weight, args)


def loss_of(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Return e H e^T of each row, in float64."""
    e = weight.double() - rounded.double()
    return (e @ hessian.double() * e).sum(1)
