"""The scheme of a module with another number of bits, for the same server."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

__all__ = ["scheme_with_bits"]


def scheme_with_bits(scheme: QuantizationScheme, bits: int) -> QuantizationScheme | None:
    """Return a scheme whose weights have other bits; None if there is none.

    Integer weights keep their groups and inputs. FP4 becomes FP8 with dynamic inputs. Integer
    weights with static scales of inputs have none, since those would take calibration data.

    >>> scheme_with_bits(preset_name_to_scheme("W4A16", ["Linear"]), 8).weights.group_size
    128
    """
    weights, inputs = scheme.weights, scheme.input_activations
    if weights is None:
        return None
    if bits == weights.num_bits:
        return scheme
    if weights.type == "float":
        return preset_name_to_scheme("FP8_DYNAMIC", list(scheme.targets)) if bits == 8 else None
    if inputs is not None and inputs.dynamic is not True:
        return None
    changed = weights.model_copy(update={"num_bits": bits})
    return scheme.model_copy(update={"weights": changed, "format": None})
