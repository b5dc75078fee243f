"""Which of vLLM's implementations serves a scheme of compressed-tensors, if any does.

As in vLLM's main branch of September 2026. It asks for the format of the config group, or else of
the whole config.
"""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from steelyard.doctor.vllm_rules import Unservable
from steelyard.formats import describe_args

__all__ = ["check_cache", "vllm_scheme"]

_WITH_ACTIVATIONS = {
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
}
_PACKED = "pack-quantized"
_GROUPS = ("group", "channel")
_WHOLE = ("tensor", "channel")


def vllm_scheme(scheme: QuantizationScheme, format: str) -> str:
    """Return the name of the implementation, as vLLM's log has it; raise `Unservable`.

    format: that of the config group, or else of the whole config

    >>> vllm_scheme(preset_name_to_scheme("W4A16", ["Linear"]), "pack-quantized")
    'WNA16'
    """
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None:
        raise Unservable("a config group without weights is refused")
    name = _of_weights(weights, inputs)
    if name is None and format == _PACKED:
        name = _packed(weights, inputs, scheme.output_activations)
    if name is None and format in _WITH_ACTIVATIONS:
        name = _with_activations(weights, inputs)
    if name is None:
        given = f"{describe_args(weights)} weights"
        with_ = f" with {describe_args(inputs)} activations" if inputs is not None else ""
        raise Unservable(f"no scheme of vLLM serves {given}{with_} stored as {format}")
    return name


def _of_weights(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> str | None:
    """Formats of 4- and 8-bit floats with group scales, whatever the format is called."""
    if _is_float(weights, 4, "tensor_group", 16):
        if inputs is None:
            return "W4A4Fp4 (16-bit activations)"
        if not _is_float(inputs, 4, "tensor_group", 16):
            raise Unservable("NVFP4 weights need NVFP4 activations, or none")
        return "W4A4Fp4"
    if _is_float(weights, 4, "group", 32):
        return "W4A4Mxfp4"
    if _is_float(weights, 8, "group", 32) and _is_bytes(weights):
        return "W8A8Mxfp8"
    return None


def _packed(
    weights: QuantizationArgs, inputs: QuantizationArgs | None, outputs: QuantizationArgs | None
) -> str | None:
    if weights.strategy not in _GROUPS or weights.dynamic:
        return None
    if inputs is None:
        return "WNA16"
    if weights.type != "int":
        return None
    if outputs is not None and _is_static_int8(inputs) and _is_static_int8(outputs):
        return "WNA8O8Int"
    token = inputs.strategy in ("token", "group") and inputs.dynamic and inputs.symmetric
    if token and inputs.type == "int" and inputs.num_bits in (4, 8):
        return f"WNA{inputs.num_bits}Int"
    if token and inputs.type == "float" and weights.strategy == "group" and weights.symmetric:
        return "W4A8Fp8" if weights.num_bits == 4 else None
    return None


def _with_activations(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> str | None:
    if not weights.symmetric or weights.dynamic:
        return None
    if weights.type == "float" and weights.strategy in (*_WHOLE, "block"):
        if inputs is None:
            return "W8A16Fp8"
        static = inputs.symmetric and inputs.strategy == "tensor"
        if inputs.type == "float" and (inputs.dynamic or static):
            return "W8A8Fp8"
        return "W8A16Fp8"
    if inputs is None or inputs.num_bits != 8:
        return None
    if weights.num_bits == 8 and weights.strategy in _WHOLE:
        static = inputs.strategy == "tensor" and not inputs.dynamic
        return "W8A8Int8" if static or (inputs.strategy == "token" and inputs.dynamic) else None
    token = inputs.strategy == "token" and inputs.dynamic
    if weights.num_bits == 4 and weights.strategy in _GROUPS and token:
        return "W4A8Int"
    return None


def check_cache(args: QuantizationArgs) -> None:
    """Raise `Unservable` for a KV cache that vLLM does not read."""
    if (args.type, args.num_bits) != ("float", 8):
        raise Unservable(f"kv_cache_scheme: {describe_args(args)}; vLLM reads 8-bit floats")
    if args.strategy not in ("tensor", "attn_head") or not args.symmetric:
        raise Unservable(
            f"kv_cache_scheme: {describe_args(args)}; vLLM reads symmetric scales per tensor or "
            "per head"
        )


def _is_float(args: QuantizationArgs, bits: int, strategy: str, group_size: int) -> bool:
    kind = (args.type, args.num_bits, args.strategy, args.group_size, args.symmetric)
    return kind == ("float", bits, strategy, group_size, True)


def _is_bytes(args: QuantizationArgs) -> bool:
    return str(args.scale_dtype) == "torch.uint8"


def _is_static_int8(args: QuantizationArgs) -> bool:
    return (args.type, args.num_bits, args.strategy) == ("int", 8, "tensor") and not args.dynamic
