"""Rounds a weight to its stored values, some rows at a time, so that they stay in the cache."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize

from steelyard.formats.tensor_names import GLOBAL_SCALE, ZERO_POINT

__all__ = ["rounded_weight"]

_AT_ONCE = 1 << 18  # weights; the input of an operation takes 1 MB in fp32
_BY_ROW = (
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
)


def rounded_weight(module: Any) -> torch.Tensor:
    """Return the values that the weight of a module is stored as, as compressed-tensors does."""
    weight, args = module.weight.data, module.quantization_scheme.weights
    rows = max(_AT_ONCE // max(weight.shape[-1], 1), 1)
    in_parts = args.strategy in _BY_ROW and weight.ndim == 2 and len(weight) > rows
    if not in_parts or weight.device.type != "cpu":
        whole: torch.Tensor = forward_quantize(module, weight, "weight", args)
        return whole
    scale, zero_point = module.weight_scale, getattr(module, ZERO_POINT, None)
    each = [
        fake_quantize(
            weight[start : start + rows],
            scale[start : start + rows],
            None if zero_point is None else zero_point[start : start + rows],
            args,
            global_scale=getattr(module, GLOBAL_SCALE, None),
        )
        for start in range(0, len(weight), rows)
    ]
    return torch.cat(each)
