"""Weights that are far from zero are no sign of a wrong scale."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.checkpoint.deviation import Deviation
from steelyard.formats import CodeGrid

ARGS = QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=False)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("times", "good"), [(1.0, True), (4.0, False)])
def test_weights_of_one_sign(sign: float, times: float, good: bool) -> None:
    """An asymmetric range holds zero, so it is much wider than the weights' own."""
    torch.manual_seed(0)
    weight = sign * (1 + 0.1 * torch.rand(64, 128))
    step = torch.full_like(weight, times * 1.1 / 15)
    zero_point = -8.0 if sign > 0 else 7.0
    codes = (weight / step + zero_point).round().clamp(-8, 7)
    deviation = Deviation()
    deviation.add(weight, (codes - zero_point) * step, CodeGrid(-zero_point * step, step), ARGS)
    problem = deviation.problem(nearest=True)
    assert problem is None if good else "scales that are too large" in str(problem)
