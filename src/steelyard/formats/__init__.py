"""Stored formats: one descriptor each for names, types, shapes, packing and decoding."""

from steelyard.formats.descriptions import describe_args
from steelyard.formats.module_tensors import (
    expected_attention_tensors,
    expected_tensors,
    stored_tensors,
)
from steelyard.formats.stored_format import CodeGrid, StoredFormat, TensorSpec
from steelyard.formats.table import DENSE, FORMATS, format_named, format_of, stored_as

__all__ = [
    "DENSE",
    "FORMATS",
    "CodeGrid",
    "StoredFormat",
    "TensorSpec",
    "describe_args",
    "expected_attention_tensors",
    "expected_tensors",
    "format_named",
    "format_of",
    "stored_as",
    "stored_tensors",
]
