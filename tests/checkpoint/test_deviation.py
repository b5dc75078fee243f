"""Which decoded weights are accepted as those of the source."""

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


@pytest.mark.parametrize(
    ("steps", "reported", "good"),
    [(1.2, None, True), (2.0, None, False), (2.0, 1.0, True), (2.0, 0.01, False)],
)
def test_weights_that_gptq_moved(steps: float, reported: float | None, good: bool) -> None:
    """Weights may be as far from the source as the run reported, as a part of that error."""
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    step = weight.reshape(-1, 32).abs().amax(1) / 7.5
    step = step.repeat_interleave(32).reshape(64, 128)
    decoded = weight + steps * step * torch.randn(64, 128)
    deviation = Deviation()
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    deviation.add(weight, decoded, CodeGrid(torch.zeros(()), step), args)
    error = None if reported is None else reported * deviation.relative_error
    problem = deviation.problem(nearest=False, reported=error)
    assert problem is None if good else "steps from the source" in str(problem)


@pytest.mark.parametrize(("times", "good"), [(0.5, False), (1.0, True), (2.0, False)])
@pytest.mark.parametrize("noise", [0.0, 1.2])
def test_scales_of_moved_weights(noise: float, times: float, good: bool) -> None:
    """A wrong scale is found beside the noise that GPTQ adds, in coarse steps too."""
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    step = weight.reshape(-1, 32).abs().amax(1).log2().floor().exp2() / 4  # as MXFP4 has it
    step = step.repeat_interleave(32).reshape(64, 128)
    decoded = times * (weight + noise * step * torch.randn(64, 128))
    deviation = Deviation()
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
    deviation.add(weight, decoded, CodeGrid(torch.zeros(()), times * step), args)
    problem = deviation.problem(nearest=False)
    assert problem is None if good else problem
