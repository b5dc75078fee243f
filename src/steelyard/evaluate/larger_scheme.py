"""The next larger scheme of a module: what to try where a block costs too much."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationScheme

from steelyard.formats.scheme_bits import scheme_with_bits

__all__ = ["larger_scheme"]

_BITS = (2, 3, 4, 8)  # of integer weights that servers read


def larger_scheme(scheme: QuantizationScheme) -> QuantizationScheme | None:
    """Return a scheme with more bits that the same server runs; None for an unquantized module.

    Integer weights keep their groups and inputs, FP4 becomes FP8 with dynamic inputs. Static scales
    of inputs would take calibration data, so such modules become unquantized.

    >>> larger_scheme(preset_name_to_scheme("W4A16", ["Linear"])).weights.num_bits
    8
    """
    weights = scheme.weights
    if weights is None or weights.num_bits >= 8:
        return None
    wider = 8 if weights.type == "float" else next(b for b in _BITS if b > weights.num_bits)
    return scheme_with_bits(scheme, wider)
