"""Which schemes are served by kernels that all read negative scales."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationScheme

__all__ = ["reads_signed_scales"]


def reads_signed_scales(scheme: QuantizationScheme) -> bool:
    """Whether every kernel that serves a scheme multiplies by the weight scale as it is stored.

    That is so for symmetric integers of 2 to 7 bits beside 16-bit activations: several kernels read
    int4; Humming alone reads the other widths, with the code that reads int4. Kernels for 8 bits
    were not read, where the extra code is 1 of 256. Kernels for quantized activations may read
    scales as unsigned.

    >>> from compressed_tensors.quantization import preset_name_to_scheme
    >>> [reads_signed_scales(preset_name_to_scheme(n, [])) for n in ("W4A16", "W8A16", "W4A8")]
    [True, False, False]
    """
    args = scheme.weights
    if args is None or scheme.input_activations or scheme.output_activations:
        return False
    return bool(args.type == "int" and args.num_bits < 8 and args.symmetric and not args.dynamic)
