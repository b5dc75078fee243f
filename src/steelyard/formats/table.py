"""The table of formats that are written and read.

A new format of compressed-tensors needs one entry here; a new preset of known formats needs none.
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme

from steelyard.errors import StrategyError, nearest
from steelyard.formats.code_bytes import CodeBytes
from steelyard.formats.dense import Dense
from steelyard.formats.int32_words import Int32Words
from steelyard.formats.packed_floats import PackedFloats
from steelyard.formats.stored_format import StoredFormat

__all__ = [
    "DENSE",
    "FORMATS",
    "MIXED",
    "format_named",
    "format_of",
    "is_layout",
    "overall_format",
    "stored_as",
]

DENSE = "dense"
"""The format of an ordinary model: weights in their own type, no scales."""
MIXED = "mixed-precision"
"""The format of a checkpoint whose modules have several formats."""

_FAKE = "fakequant"  # quantized values in the original type, as older versions wrote
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.uint8

FORMATS: dict[str, StoredFormat] = {
    format.name: format
    for format in (
        Dense(DENSE, "not quantized"),
        CodeBytes("int-quantized", "integers, one per byte"),
        CodeBytes("float-quantized", "8-bit floats"),
        CodeBytes("naive-quantized", "integers or 8-bit floats, one per byte"),
        Int32Words("pack-quantized", "integers packed into 32-bit words"),
        PackedFloats(
            "nvfp4-pack-quantized", "4-bit floats, two per byte, E4M3 scales", scale_dtype=_E4M3
        ),
        PackedFloats(
            "mxfp4-pack-quantized", "4-bit floats, two per byte, E8M0 scales", scale_dtype=_E8M0
        ),
        PackedFloats(
            "mxfp6-pack-quantized",
            "6-bit floats, four in three bytes, E8M0 scales",
            scale_dtype=_E8M0,
            num_bits=6,
        ),
        CodeBytes(
            "mxfp8-quantized", "8-bit floats, E8M0 scales", scale_dtype=_E8M0, integers=False
        ),
    )
}


def format_named(name: str) -> StoredFormat:
    """Return a format by its name in config.json."""
    if name not in FORMATS:
        raise StrategyError(
            f"no compressor writes the format {name!r}; {nearest(name, list(FORMATS))}"
        )
    return FORMATS[name]


def format_of(scheme: QuantizationScheme) -> str:
    """Return the name of the format of a Linear of this scheme; `scheme.format` decides if set.

    >>> format_of(preset_name_to_scheme("W4A16", ["Linear"]))
    'pack-quantized'
    """
    chosen = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    return str(CompressionFormat(chosen).value)


def stored_as(scheme: QuantizationScheme) -> StoredFormat:
    """Return the format in which a Linear of this scheme is stored."""
    return format_named(format_of(scheme))


def is_layout(overall: str) -> bool:
    """Whether the overall format of a checkpoint is that of its modules too."""
    return overall not in (DENSE, _FAKE, MIXED)


def overall_format(formats: set[str]) -> str:
    """Return the format of a whole checkpoint, given those of its config groups.

    >>> overall_format({"pack-quantized"}), overall_format({"dense", "int-quantized"})
    ('pack-quantized', 'mixed-precision')
    """
    if not formats:
        return DENSE
    return min(formats) if len(formats) == 1 else MIXED
