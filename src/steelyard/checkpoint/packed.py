"""The tensors that a file holds for one quantized module."""

from __future__ import annotations

from typing import Any

import torch

from steelyard.checkpoint.weight_errors import relative_error
from steelyard.formats import DENSE, stored_as, stored_tensors

__all__ = ["Packed", "pack_module"]

Packed = tuple[dict[str, torch.Tensor], float | None]
"""Stored tensors of a module by local name, and the relative error of its weight."""


def pack_module(module: Any, format: str | None) -> Packed | None:
    """Return the stored tensors of a quantized module, and their error; None for other modules."""
    scheme = getattr(module, "quantization_scheme", None)
    parameters = {n: p.data for n, p in module._parameters.items() if p is not None}
    weight = parameters.pop("weight", None)
    if scheme is None or weight is None:
        return None
    parameters.pop("bias", None)
    if scheme.weights is None:
        kept = {} if format == DENSE else stored_tensors(weight, parameters, scheme)
        return {**kept, "weight": weight}, None
    errors = torch.zeros(len(weight), dtype=torch.float64)
    if format == DENSE:
        stored = stored_tensors(weight, parameters, scheme, errors=errors)
        decoded = stored_as(scheme).compressor.decompress(stored, scheme)["weight"]
        stored = {"weight": decoded.to(weight.dtype)}
    else:
        stored = stored_tensors(weight, parameters, scheme, format, errors=errors)
    return stored, relative_error(float(errors.sum()), weight)
