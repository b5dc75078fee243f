"""Weights in a wider type, and rounded, for as long as a layer runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from torch.nn import Linear, Parameter
from torch.testing import assert_close

from steelyard.model.precision import rounded_once


def quantized_linears(count: int = 5) -> list[Any]:
    found: list[Any] = []
    torch.manual_seed(0)
    for number in range(count):
        linear: Any = Linear(256, 8 + number, bias=False).bfloat16()
        linear.quantization_scheme = preset_name_to_scheme("W4A16", ["Linear"])
        linear.quantization_status = QuantizationStatus.FROZEN
        scale = torch.rand(8 + number, 2).bfloat16() / 50 + 0.01
        linear.weight_scale = Parameter(scale, requires_grad=False)
        zero = torch.zeros(8 + number, 2, dtype=torch.int8)
        linear.weight_zero_point = Parameter(zero, requires_grad=False)
        found.append(linear)
    return found


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_weights_are_rounded_inside_and_the_stored_ones_come_back(
    dtype: torch.dtype | None,
) -> None:
    linears = quantized_linears()
    stored = [(m.weight.data, m.weight.clone(), m.weight_scale.clone()) for m in linears]
    wide = dtype or torch.bfloat16
    with rounded_once(linears, dtype):
        for each, (_, weight, scale) in zip(linears, stored, strict=True):
            args = each.quantization_scheme.weights
            zero = torch.zeros_like(scale, dtype=torch.int8)
            expected = fake_quantize(weight.to(wide), scale.to(wide), zero, args)
            assert_close(each.weight.data, expected, rtol=0, atol=0)
            assert each.quantization_status == QuantizationStatus.COMPRESSED
    for each, (data, weight, scale) in zip(linears, stored, strict=True):
        assert each.weight.data_ptr() == data.data_ptr()
        assert_close(each.weight.data, weight.data, rtol=0, atol=0)
        assert_close(each.weight_scale.data, scale.data, rtol=0, atol=0)
        assert each.quantization_status == QuantizationStatus.FROZEN


def test_wider_weights_are_one_piece_of_memory() -> None:
    """Freed temporaries between them would keep as much again."""
    linears = quantized_linears()
    with rounded_once(linears, torch.float32):
        assert len({each.weight.untyped_storage().data_ptr() for each in linears}) == 1
        starts = [each.weight.data_ptr() for each in linears]
        sizes = [each.weight.nbytes for each in linears]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_an_error_puts_all_back() -> None:
    linears = quantized_linears()
    stored = [each.weight.data_ptr() for each in linears]
    del linears[-1].weight_scale
    with pytest.raises(AttributeError), rounded_once(linears, torch.float32):
        raise AssertionError("not reached")
    assert [each.weight.data_ptr() for each in linears] == stored
    assert {each.quantization_status for each in linears} == {QuantizationStatus.FROZEN}
    assert {each.weight.dtype for each in linears} == {torch.bfloat16}
