"""What a checkpoint holds for one Linear: names, types, shapes and bytes.

compressed-tensors defines the layout. Its compressors take a module's tensors and return those of
the file; here the same is done without a module, and the weight goes through our own kernel. What
the kernel does not cover is left to the compressor itself, so every format it knows can be written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from steelyard.errors import StrategyError, nearest
from steelyard.kernels.pack import quantize_and_pack, squared_error

__all__ = [
    "compressor_of",
    "expected_attention_tensors",
    "expected_tensors",
    "format_of",
    "stored_tensors",
    "words_for",
]

TensorSpec = tuple[torch.dtype, tuple[int, ...]]

_WORDS = "pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_MX_PACKED = {"mxfp4-pack-quantized": 4, "mxfp6-pack-quantized": 6}
_MXFP8 = "mxfp8-quantized"
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def format_of(scheme: QuantizationScheme) -> str:
    """Return the format in which a Linear of this scheme is stored; `scheme.format` decides if set.

    >>> format_of(preset_name_to_scheme("W4A16", ["Linear"]))
    'pack-quantized'
    """
    chosen = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    return str(CompressionFormat(chosen).value)


def compressor_of(format: str) -> Any:
    """Return compressed-tensors' compressor, a class with `compress` and `decompress`."""
    known = [*_PLAIN, *_MX_PACKED, _WORDS, _NVFP4, _MXFP8, "dense"]
    if format not in known:
        raise StrategyError(f"no compressor writes the format {format!r}; {nearest(format, known)}")
    return BaseCompressor.get_value_from_registry(format)


def stored_tensors(
    weight: torch.Tensor | None,
    qparams: Mapping[str, torch.Tensor],
    scheme: QuantizationScheme,
    format: str | None = None,
    errors: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return what the file holds for a Linear, under local names such as `weight_packed`.

    weight:  (out, in); None returns the parameters of the activations alone
    qparams: `weight_scale`, `weight_zero_point`, `weight_global_scale`, `input_scale` and so on,
             as `Observer.get_qparams` returns them
    errors:  (out,), fp64; filled with the squared error of each row, where the scheme quantizes
             weights
    """
    name = format or format_of(scheme)
    compressor = compressor_of(name)
    kept = {key: value for key, value in qparams.items() if key not in _unstored(scheme, name)}
    if weight is None:
        return {key: value for key, value in kept.items() if not key.startswith("weight_")}
    args = scheme.weights
    if name != "dense" and (args is None or "weight_scale" not in qparams):
        raise StrategyError(
            f"the format {name} needs quantized weights and a weight_scale; the scheme has "
            f"{'no weights' if args is None else 'weights'}, the parameters are {sorted(qparams)}"
        )
    if "weight_g_idx" in kept and "weight_g_idx" not in compressor.compression_param_names(scheme):
        raise StrategyError(
            f"the installed compressed-tensors does not store weight_g_idx as {name}; quantize "
            "with actorder='weight', or without activation order"
        )
    if not _kernel_covers(name, weight, args) or "weight_g_idx" in kept:
        if errors is not None and args is not None:
            errors.zero_()[0] = _squared_error(weight, qparams, args)
        return dict(compressor.compress({"weight": weight, **qparams}, scheme))
    stored = {**kept, **_stored_weight(weight, qparams, args, name, errors)}
    if errors is not None and not bool(torch.isfinite(errors).all()):  # too large for fp32
        errors.zero_()[0] = _squared_error(weight, qparams, args)
    return stored


def _squared_error(
    weight: torch.Tensor, qparams: Mapping[str, torch.Tensor], args: QuantizationArgs
) -> float:
    zero_point = None if args.symmetric else qparams["weight_zero_point"]
    global_scale = qparams.get("weight_global_scale")
    scale = qparams["weight_scale"]
    return squared_error(weight, scale, zero_point, args, global_scale, backend="reference")


def _unstored(scheme: QuantizationScheme, format: str) -> set[str]:
    """Return the zero points that are zero by definition, which the server refuses to load."""
    parts = {
        "weight": scheme.weights,
        "input": scheme.input_activations,
        "output": scheme.output_activations,
    }
    if format == "dense":  # stored as it is, whatever it is
        return set()
    return {f"{base}_zero_point" for base, args in parts.items() if args and args.symmetric}


def _kernel_covers(format: str, weight: torch.Tensor, args: QuantizationArgs | None) -> bool:
    if args is None or weight.ndim != 2 or weight.dtype not in _FLOATS[:3]:
        return False
    if args.type == "int":
        return args.num_bits <= 8 and format in (_WORDS, *_PLAIN)
    if args.num_bits == 8:
        return format in (_MXFP8, *_PLAIN)
    return args.num_bits == 4 and bool(args.symmetric) and format in (_NVFP4, *_MX_PACKED)


def _stored_weight(
    weight: torch.Tensor,
    qparams: Mapping[str, torch.Tensor],
    args: QuantizationArgs,
    format: str,
    errors: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    scale, zero_point = qparams["weight_scale"], qparams.get("weight_zero_point")
    # the compressors of other formats take no notice of a second scale
    global_scale = qparams.get("weight_global_scale") if format in (_NVFP4, *_MX_PACKED) else None
    words = format == _WORDS
    packed = words and words_for(32, args.num_bits) == args.num_bits  # else padded
    codes = quantize_and_pack(
        weight, scale, zero_point, args, global_scale, packed=packed, errors=errors
    )
    if words and not packed:
        codes = pack_to_int32(codes, args.num_bits)
    stored = {"weight_scale": _stored_scale(scale, args, format)}
    if format in (*_PLAIN, _MXFP8):
        return {**stored, "weight": codes}
    stored["weight_packed"] = codes
    if words:
        stored["weight_shape"] = torch.tensor(weight.shape)
        if zero_point is not None and _packs_zero_point(args):
            packed_zero_point = pack_to_int32(zero_point, args.num_bits, packed_dim=0)
            stored["weight_zero_point"] = packed_zero_point.contiguous()
    return stored


def _stored_scale(scale: torch.Tensor, args: QuantizationArgs, format: str) -> torch.Tensor:
    dtype = _scale_dtype(args, scale.dtype, format)
    if format in (*_MX_PACKED, _MXFP8):
        return torch.as_tensor(compress_mx_scale(scale, dtype))
    return scale.to(dtype) if format == _NVFP4 else scale


def _packs_zero_point(args: QuantizationArgs) -> bool:
    return not args.symmetric and args.strategy in ("group", "channel")


@lru_cache(maxsize=256)
def words_for(count: int, num_bits: int) -> int:
    """Return how many int32 hold `count` values.

    compressed-tensors itself is asked: up to 0.17 a value of 3, 5, 6 or 7 bits never straddles two
    words, from 0.20 on it does.
    """
    period = 32 * (32 // num_bits)  # values after which either way of packing begins a new word
    if count > period:
        return count // period * words_for(period, num_bits) + words_for(count % period, num_bits)
    return int(pack_to_int32(torch.zeros(1, count, dtype=torch.int8), num_bits).shape[1])


def expected_tensors(
    scheme: QuantizationScheme, shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Return type and shape of everything that a Linear must have in the file, but for its bias.

    shape: (out, in) of the weight before it was quantized
    dtype: its type then, which is also the type of scales that the format leaves open
    """
    expected: dict[str, TensorSpec] = {"weight": (dtype, shape)}
    if scheme.weights is not None:
        expected = _expected_weight(scheme.weights, shape, dtype, format_of(scheme))
    for base, args, width in (
        ("input", scheme.input_activations, shape[1]),
        ("output", scheme.output_activations, shape[0]),
    ):
        if args is not None:
            expected.update(_expected_activation(base, args, width, dtype))
    return expected


def _expected_weight(
    args: QuantizationArgs, shape: tuple[int, int], dtype: torch.dtype, format: str
) -> dict[str, TensorSpec]:
    rows, columns = shape
    parameters = _parameter_shape(args, shape)
    expected: dict[str, TensorSpec] = {}
    expected["weight_scale"] = (_scale_dtype(args, dtype, format), parameters)
    if args.strategy == "tensor_group":
        expected["weight_global_scale"] = (torch.float32, (1,))
    if not args.symmetric:
        expected["weight_zero_point"] = (args.zp_dtype, parameters)
    if args.actorder == "group":
        expected["weight_g_idx"] = (torch.int32, (columns,))
    if format in (_NVFP4, *_MX_PACKED):
        bits = _MX_PACKED.get(format, 4)
        expected["weight_packed"] = (torch.uint8, (rows, columns * bits // 8))
    elif format == _WORDS:
        expected["weight_packed"] = (torch.int32, (rows, words_for(columns, args.num_bits)))
        expected["weight_shape"] = (torch.int64, (2,))
        if _packs_zero_point(args):
            packed = (words_for(rows, args.num_bits), parameters[1])
            expected["weight_zero_point"] = (torch.int32, packed)
    else:
        expected["weight"] = (args.pytorch_dtype() if format != "dense" else dtype, shape)
    return expected


def _expected_activation(
    base: str, args: QuantizationArgs, width: int, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Parameters of what goes in or comes out; a dynamic scale is found while serving."""
    if args.dynamic is True:
        return {}
    expected: dict[str, TensorSpec] = {}
    if args.strategy == "tensor_group":
        expected[f"{base}_global_scale"] = (torch.float32, (1,))
    if args.dynamic == "local":
        return expected
    parameters = (1,) if args.strategy == "tensor" else (_groups(width, args),)
    expected[f"{base}_scale"] = (_scale_dtype(args, dtype), parameters)
    if not args.symmetric:
        expected[f"{base}_zero_point"] = (args.zp_dtype, parameters)
    return expected


def expected_attention_tensors(
    args: QuantizationArgs, dtype: torch.dtype, num_kv_heads: int
) -> dict[str, TensorSpec]:
    """Return what an attention module has for its quantized cache: `k_scale` and `v_scale`."""
    if args.dynamic is True:
        return {}
    shape = (1,) if args.strategy == "tensor" else (num_kv_heads, 1, 1)
    expected: dict[str, TensorSpec] = {}
    for base in ("k", "v"):
        expected[f"{base}_scale"] = (_scale_dtype(args, dtype), shape)
        if not args.symmetric:
            expected[f"{base}_zero_point"] = (args.zp_dtype, shape)
    return expected


def _scale_dtype(args: QuantizationArgs, dtype: torch.dtype, format: str = "") -> torch.dtype:
    """Return the type that a scale has in the file, given the type of the tensor it belongs to."""
    if format in (*_MX_PACKED, _MXFP8):
        return args.scale_dtype or torch.uint8
    if format == _NVFP4:
        return args.scale_dtype or torch.float8_e4m3fn
    stored = args.scale_dtype or dtype
    return stored if stored in _FLOATS else torch.float32  # codes are stored as their value


def _parameter_shape(args: QuantizationArgs, shape: tuple[int, int]) -> tuple[int, ...]:
    rows, columns = shape
    if args.strategy == "tensor":
        return (1,)
    if args.strategy == "channel":
        return (rows, 1)
    if args.strategy == "block":
        height, width = args.block_structure
        return (math.ceil(rows / height), math.ceil(columns / width))
    return (rows, _groups(columns, args))


def _groups(width: int, args: QuantizationArgs) -> int:
    if not args.group_size or width % args.group_size:
        raise StrategyError(
            f"strategy {args.strategy!r} with group_size={args.group_size} does not divide "
            f"{width} columns; choose a group size that does, or ignore the layer"
        )
    return int(width // args.group_size)
