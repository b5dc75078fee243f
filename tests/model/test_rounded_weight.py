"""Weights that are rounded some rows at a time are those of compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch.nn import Linear

from steelyard.model import rounded_weight as module_of
from steelyard.model.rounded_weight import rounded_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("args", "blocks"),
    [
        ({"num_bits": 4, "strategy": "group", "group_size": 8}, 4),
        ({"num_bits": 8, "strategy": "channel"}, 1),
        ({"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}, 2),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, 1),
    ],
)
def test_rows_are_rounded_alike(
    args: dict[str, Any], blocks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer: Any = Linear(32, 21, bias=False, dtype=dtype)
    weights = QuantizationArgs(**args)
    layer.quantization_scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    layer.quantization_status = QuantizationStatus.CALIBRATION
    layer.weight_scale = torch.nn.Parameter(torch.rand(21, blocks).to(dtype) / 50 + 0.01)
    zeros = torch.randint(0, 3, (21, blocks)) if not weights.symmetric else torch.zeros(21, blocks)
    layer.weight_zero_point = torch.nn.Parameter(zeros.to(torch.int8), requires_grad=False)
    whole = forward_quantize(layer, layer.weight.data, "weight", weights)
    monkeypatch.setattr(module_of, "_AT_ONCE", 4 * 32)
    parts = rounded_weight(layer)
    assert parts.dtype == whole.dtype
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
