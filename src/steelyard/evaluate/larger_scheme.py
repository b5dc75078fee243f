"""The next larger scheme of a module: what to try where a block costs too much."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

__all__ = ["larger_scheme"]

_BITS = (2, 3, 4, 8)  # of integer weights that servers read


def larger_scheme(scheme: QuantizationScheme) -> QuantizationScheme | None:
    """Return a scheme with more bits that the same server runs; None for an unquantized module.

    Integer weights keep their groups and inputs, FP4 becomes FP8 with dynamic inputs. Static scales
    of inputs would take calibration data, so such modules become unquantized.

    >>> larger_scheme(preset_name_to_scheme("W4A16", ["Linear"])).weights.num_bits
    8
    """
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None or weights.num_bits >= 8:
        return None
    if weights.type == "float":
        return preset_name_to_scheme("FP8_DYNAMIC", list(scheme.targets))
    if inputs is not None and inputs.dynamic is not True:
        return None
    bits = next(each for each in _BITS if each > weights.num_bits)
    larger = weights.model_copy(update={"num_bits": bits})
    return scheme.model_copy(update={"weights": larger, "format": None})
