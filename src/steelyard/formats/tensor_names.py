"""The local names of a module's stored tensors, and their meaning.

    weight           plain, or one code per byte
    weight_packed    several codes per byte or word
    weight_shape     (out, in) before it was packed
    weight_g_idx     the group of each column
    *_scale, *_global_scale, *_zero_point    of weight, input, output, q, k or v

Nothing else in the package parses such a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

__all__ = [
    "GLOBAL_SCALE",
    "GROUP_INDEX",
    "PACKED",
    "SCALE",
    "SHAPE",
    "WEIGHT",
    "ZERO_POINT",
    "base_of",
    "holds_values",
    "is_global_scale",
    "is_parameter",
    "is_scale",
    "is_state_parameter",
    "is_zero_point",
    "stores_codes",
    "weight_tensors",
]

WEIGHT = "weight"
PACKED = "weight_packed"
SCALE = "weight_scale"
GLOBAL_SCALE = "weight_global_scale"
ZERO_POINT = "weight_zero_point"
SHAPE = "weight_shape"
GROUP_INDEX = "weight_g_idx"

_PARAMETER = re.compile(r"(weight|input|output)_(packed|scale|zero_point|global_scale|shape|g_idx)")
_STATE_PARAMETER = re.compile(r"([qkv])_(scale|zero_point)")
_SCALE = re.compile(r"(^|_)scales?(_inv)?$")  # those of other formats too


def base_of(local: str) -> str | None:
    """Return whose parameter a tensor is: weight, input, output, q, k or v; None for no parameter.

    >>> base_of("input_global_scale"), base_of("k_scale"), base_of("bias")
    ('input', 'k', None)
    """
    match = _PARAMETER.fullmatch(local) or _STATE_PARAMETER.fullmatch(local)
    return match[1] if match else None


def is_parameter(local: str) -> bool:
    """Whether quantization added the tensor to a Linear."""
    return _PARAMETER.fullmatch(local) is not None


def is_state_parameter(local: str) -> bool:
    """Whether quantization added the tensor to an attention module."""
    return _STATE_PARAMETER.fullmatch(local) is not None


def is_scale(local: str) -> bool:
    """Whether the tensor holds scales, of this or another format.

    >>> [is_scale(name) for name in ("weight_global_scale", "weight_scale_inv", "weight_shape")]
    [True, True, False]
    """
    return _SCALE.search(local) is not None


def is_global_scale(local: str) -> bool:
    """Whether the tensor holds a global scale, which is a divisor."""
    return local.endswith("_global_scale")


def is_zero_point(local: str) -> bool:
    return local.endswith("zero_point")


def holds_values(local: str) -> bool:
    """Whether the tensor holds a weight, plain or as codes."""
    return local in (WEIGHT, PACKED)


def weight_tensors(names: Iterable[str]) -> list[str]:
    """Return the tensors of a module that its weight is decoded from."""
    return [name for name in names if name == WEIGHT or base_of(name) == WEIGHT]


def stores_codes(names: Collection[str]) -> bool:
    """Whether a module with these tensors has a quantized weight."""
    return PACKED in names or SCALE in names
