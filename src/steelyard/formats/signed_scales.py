"""Which schemes are served by kernels that all read negative scales."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationScheme

__all__ = ["reads_signed_scales"]


def reads_signed_scales(scheme: QuantizationScheme) -> bool:
    """Whether every kernel that serves a scheme multiplies by the weight scale as it is stored.

    That is so for symmetric int4 beside 16-bit activations. Kernels for quantized activations may
    read scales as unsigned.
    """
    args = scheme.weights
    if args is None or scheme.input_activations or scheme.output_activations:
        return False
    return bool(args.type == "int" and args.num_bits == 4 and args.symmetric and not args.dynamic)
