"""The tensors that a checkpoint holds for one module: names, types, shapes and bytes."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from steelyard.errors import StrategyError
from steelyard.formats.scale_codes import float_scale_dtype
from steelyard.formats.stored_format import Tensors, TensorSpec
from steelyard.formats.table import DENSE, format_named, format_of, stored_as
from steelyard.formats.tensor_names import (
    GLOBAL_SCALE,
    GROUP_INDEX,
    SCALE,
    WEIGHT,
    ZERO_POINT,
    base_of,
)
from steelyard.kernels.pack import squared_error
from steelyard.kernels.scale_blocks import group_count

__all__ = ["expected_attention_tensors", "expected_tensors", "stored_tensors", "values_of"]


def values_of(scheme: QuantizationScheme) -> dict[str, QuantizationArgs]:
    """Return the arguments of each quantized value of a Linear, by base name."""
    values = {
        "weight": scheme.weights,
        "input": scheme.input_activations,
        "output": scheme.output_activations,
    }
    return {base: args for base, args in values.items() if args is not None}


def stored_tensors(
    weight: torch.Tensor | None,
    qparams: Tensors,
    scheme: QuantizationScheme,
    format: str | None = None,
    errors: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a Linear, under local names such as `weight_packed`.

    weight:  (out, in); None returns only the parameters of activations
    qparams: `weight_scale`, `weight_zero_point`, `weight_global_scale`, `input_scale` and so on,
             as `Observer.get_qparams` returns them
    errors:  (out,), fp64; filled with the squared error of each row, where the scheme quantizes
             weights
    """
    stored_format = format_named(format or format_of(scheme))
    name = stored_format.name
    kept = {key: value for key, value in qparams.items() if key not in _unstored(scheme, name)}
    if weight is None:
        return {key: value for key, value in kept.items() if base_of(key) != WEIGHT}
    args = scheme.weights
    if name != DENSE and (args is None or SCALE not in qparams):
        raise StrategyError(
            f"the format {name} needs quantized weights and a {SCALE}; the scheme has "
            f"{'no weights' if args is None else 'weights'}, the parameters are {sorted(qparams)}"
        )
    if GROUP_INDEX in kept and not stored_format.stores(GROUP_INDEX, scheme):
        raise StrategyError(
            f"the installed compressed-tensors does not store {GROUP_INDEX} as {name}; quantize "
            "with actorder='weight', or without activation order"
        )
    if args is None or not stored_format.packs(weight, args) or GROUP_INDEX in kept:
        if errors is not None and args is not None:
            errors.zero_()[0] = _squared_error(weight, qparams, args)
        return dict(stored_format.compressor.compress({WEIGHT: weight, **qparams}, scheme))
    stored = {**kept, **stored_format.pack(weight, qparams, args, errors)}
    if errors is not None and not bool(torch.isfinite(errors).all()):  # too large for fp32
        errors.zero_()[0] = _squared_error(weight, qparams, args)
    return stored


def _unstored(scheme: QuantizationScheme, format: str) -> set[str]:
    """Return the zero points that are always zero, which the server refuses to load."""
    if format == DENSE:  # stores what it is given
        return set()
    return {f"{base}_zero_point" for base, args in values_of(scheme).items() if args.symmetric}


def _squared_error(weight: torch.Tensor, qparams: Tensors, args: QuantizationArgs) -> float:
    zero_point = None if args.symmetric else qparams[ZERO_POINT]
    scale, global_scale = qparams[SCALE], qparams.get(GLOBAL_SCALE)
    return squared_error(weight, scale, zero_point, args, global_scale, backend="reference")


def expected_tensors(
    scheme: QuantizationScheme, shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Return type and shape of every tensor that a Linear has in the file, without its bias.

    shape: (out, in) of the weight before it was quantized
    dtype: its type then, also used for scales whose type the format does not fix
    """
    expected: dict[str, TensorSpec] = {WEIGHT: (dtype, shape)}
    if scheme.weights is not None:
        expected = stored_as(scheme).tensors(scheme.weights, shape, dtype)
    widths = {"input": shape[1], "output": shape[0]}
    for base, args in values_of(scheme).items():
        if base in widths:
            expected.update(_expected_activation(base, args, widths[base], dtype))
    return expected


def _expected_activation(
    base: str, args: QuantizationArgs, width: int, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Return the static parameters of inputs or outputs; servers compute dynamic scales."""
    if args.dynamic is True:
        return {}
    expected: dict[str, TensorSpec] = {}
    if args.strategy == "tensor_group":
        expected[f"{base}_global_scale"] = (torch.float32, (1,))
    if args.dynamic == "local":
        return expected
    shape = (1,) if args.strategy == "tensor" else (group_count(args, (width,)),)
    return {**expected, **_parameters(base, args, shape, dtype)}


def expected_attention_tensors(
    args: QuantizationArgs, dtype: torch.dtype, num_kv_heads: int
) -> dict[str, TensorSpec]:
    """Return the tensors of an attention module with a quantized cache: `k_scale`, `v_scale`."""
    if args.dynamic is True:
        return {}
    shape = (1,) if args.strategy == "tensor" else (num_kv_heads, 1, 1)
    return {**_parameters("k", args, shape, dtype), **_parameters("v", args, shape, dtype)}


def _parameters(
    base: str, args: QuantizationArgs, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, TensorSpec]:
    expected: dict[str, TensorSpec] = {
        f"{base}_scale": (float_scale_dtype(args, dtype), shape),
    }
    if not args.symmetric:
        expected[f"{base}_zero_point"] = (args.zp_dtype, shape)
    return expected
