"""Fake quantization against compressed-tensors' values, and its gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as their_values
from gptq_problems import FORMATS, qparams_of, weight_of
from gptq_strategies import every_format
from torch.testing import assert_close

from steelyard.kernels.fake_quantize import code_step, dequantize, fake_quantize, stored_scale
from steelyard.kernels.pack import E2M1
from steelyard.kernels.rounding import quantized_range
from steelyard.kernels.scale_blocks import block_of

ROWS, COLUMNS = 6, 32


@every_format
def test_values_are_those_of_compressed_tensors(args: QuantizationArgs) -> None:
    weight = weight_of(ROWS, COLUMNS)
    scale, zero_point, global_scale = qparams_of(weight, args)
    scale = scale.float()
    zeros = None if args.symmetric else zero_point
    found = fake_quantize(weight, scale, zeros, args, global_scale)
    expected = their_values(weight, scale, zero_point, args, global_scale=global_scale)
    assert_close(found, expected, rtol=0, atol=0)
    assert_close(fake_quantize(found, scale, zeros, args, global_scale), found, rtol=1e-6, atol=0)


@every_format
def test_gradients_are_differences_of_the_unrounded_formula(args: QuantizationArgs) -> None:
    """Float64, element by element: what rounding adds to a code is held fixed."""
    generator = torch.Generator().manual_seed(1)
    weight = weight_of(ROWS, COLUMNS).double()
    scale, zero_point, global_scale = qparams_of(weight.float(), args)
    scale = scale.double() * 0.8  # so that some values lie outside of the range
    offset = torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64) - 0.5
    pull = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    for tensor in (weight, scale, offset):
        tensor.requires_grad_(True)
    zeros = None if args.symmetric else zero_point
    value = fake_quantize(weight, scale, zeros, args, global_scale, offset)
    (value * pull).sum().backward()

    divisor = 1.0 if global_scale is None else float(global_scale)
    height, width = block_of(args, ROWS, COLUMNS)
    low, high = quantized_range(args)
    w, v, g = (t.detach().numpy() for t in (weight, offset, pull))
    across = -(-COLUMNS // width)
    block = [[(i // height) * across + j // width for j in range(COLUMNS)] for i in range(ROWS)]
    s = scale.detach().reshape(-1).numpy()[block] / divisor
    z = 0.0 if zeros is None else zeros.double().reshape(-1).numpy()[block]
    place = w / s + z
    step = code_step(torch.from_numpy(place), args).numpy()
    rest = value.detach().numpy() / s + z - np.clip(place + v * step, low, high)

    def loss(w: np.ndarray, s: np.ndarray, v: np.ndarray) -> np.ndarray:
        return g * (np.clip(w / s + z + v * step, low, high) + rest - z) * s

    def difference(number: int) -> np.ndarray:
        given, size = [w, s, v], 1e-6 * (s if number == 1 else 1)
        above, below = list(given), list(given)
        above[number], below[number] = given[number] + size, given[number] - size
        return (loss(*above) - loss(*below)) / (2 * size)

    by_scale = np.bincount(np.ravel(block), (difference(1) / divisor).ravel())
    close = {"rtol": 1e-5, "atol": 1e-6}
    assert_close(weight.grad, torch.from_numpy(difference(0)), **close)
    assert_close(offset.grad, torch.from_numpy(difference(2)), **close)
    assert_close(scale.grad.reshape(-1), torch.from_numpy(by_scale), **close)
    assert bool((offset.grad == 0).any()) and bool((offset.grad != 0).any())


def test_scales_are_rounded_to_their_type_and_have_the_gradient_of_the_identity() -> None:
    scale = torch.tensor([0.7, -0.301, 1e-3], requires_grad=True)
    for dtype in (torch.bfloat16, torch.float16):
        assert_close(stored_scale(scale, dtype), scale.to(dtype).float(), rtol=0, atol=0)
    bits = torch.tensor([0.7, 0.301, 100.0])
    expected = bits.to(torch.float8_e4m3fn).float()
    assert_close(stored_scale(bits, torch.float8_e4m3fn), expected, rtol=0, atol=0)
    assert stored_scale(torch.tensor([0.7, 0.8, 5.9]), torch.uint8).tolist() == [0.5, 1.0, 4.0]
    (gradient,) = torch.autograd.grad(stored_scale(scale, torch.bfloat16).square().sum(), scale)
    assert_close(gradient, 2 * scale.detach().bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["int4_group", "int4_asym_channel", "NVFP4A16", "MXFP4A16"])
def test_half_a_step_reaches_the_next_code(name: str) -> None:
    args = FORMATS[name]
    ordered = list(range(-8, 8))
    if args.type == "float":
        ordered = [*(-code for code in reversed(E2M1[1:])), *E2M1]
    codes = torch.tensor([ordered], dtype=torch.float32)
    args = args.model_copy(update={"strategy": "tensor", "group_size": None})
    scale = torch.tensor([0.25])
    values = dequantize(codes, scale, None, args)
    assert_close(values, codes * 0.25, rtol=0, atol=0)
    moved = fake_quantize(values, scale, None, args, offset=torch.full_like(codes, 0.51)) / 0.25
    expected = torch.tensor([[*ordered[1:], ordered[-1]]], dtype=torch.float32)
    assert_close(moved, expected, rtol=0, atol=0)
