"""The type that batches are computed in, and weights in it, rounded, as long as a layer runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from torch.nn import Linear, Parameter
from torch.testing import assert_close

from steelyard.model import precision
from steelyard.model.precision import (
    Forward,
    forward_dtype,
    is_plain_linear,
    multiplying_in,
    rounded_once,
)


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


CPU, FLAGS = torch.device("cpu"), ("amx_tile", "avx512_bf16")


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the flags of the processor, whether torch's library uses them, and the measured gain."""

    def made(*flags: str, library: bool = True, gain: float = 1.2) -> None:
        monkeypatch.setattr(precision, "speed", lambda dtype: gain)
        monkeypatch.delenv("STEELYARD_FORWARD", raising=False)
        for name in FLAGS:
            has = functools.partial(bool, name in flags)
            monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", has, raising=False)
        answer = functools.partial(bool, library)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", answer, raising=False)

    return made


@pytest.mark.parametrize("flag", FLAGS)
def test_bf16_is_computed_where_processor_and_library_multiply_it(
    flag: str, processor: Callable[..., None]
) -> None:
    processor(flag)
    found = forward_dtype(torch.bfloat16, CPU)
    reason = f"batches are computed in bfloat16, which this CPU multiplies ({flag})"
    assert (found.dtype, found.reason) == (None, reason)
    assert forward_dtype(torch.bfloat16, CPU, compares=True) == Forward(
        True, "batches are computed in float32, since an algorithm compares outputs"
    )
    for stored in (torch.bfloat16, torch.float32):
        tunes = forward_dtype(stored, CPU, compares=True, precisely=False)
        assert (tunes.wide, tunes.narrowed) == (stored == torch.bfloat16, True)
        assert flag in tunes.reason and "float32, products of Linear layers" in tunes.reason
        assert not forward_dtype(stored, CPU, compares=True, precisely=True).narrowed
    slow = "batches are computed in float32, since this CPU is slow in "
    assert forward_dtype(torch.float16, CPU) == Forward(True, slow + "float16")
    processor(flag, library=False)
    assert forward_dtype(torch.bfloat16, CPU) == Forward(True, slow + "bfloat16")
    processor()
    assert forward_dtype(torch.bfloat16, CPU).dtype == torch.float32


@pytest.mark.parametrize("flags", [FLAGS, ()])
def test_a_clear_measurement_overrules_the_flags(
    flags: tuple[str, ...], processor: Callable[..., None]
) -> None:
    processor(*flags, gain=1.6)
    assert forward_dtype(torch.bfloat16, CPU).dtype is None
    processor(*flags, gain=0.6)
    assert forward_dtype(torch.bfloat16, CPU).dtype == torch.float32
    for unclear in (0.8, 1.4):  # next time it could be the other way round
        processor(*flags, gain=unclear)
        assert forward_dtype(torch.bfloat16, CPU).wide == (not flags)


def test_a_measured_gain_is_stated(processor: Callable[..., None]) -> None:
    processor(gain=3.0)
    reason = "batches are computed in bfloat16, which this CPU multiplies 1.5 times faster"
    assert forward_dtype(torch.bfloat16, CPU).reason == reason


def test_the_speed_is_measured_once() -> None:
    precision.speed.cache_clear()
    assert precision.speed(torch.bfloat16) > 0
    assert precision.speed(torch.bfloat16) == precision.speed(torch.bfloat16)
    assert precision.speed.cache_info().misses == 1


@pytest.mark.parametrize("asked", ["auto", "fp32", "stored"])
def test_the_environment_forces_a_type(
    asked: str, processor: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor()
    monkeypatch.setenv("STEELYARD_FORWARD", asked)
    assert forward_dtype(torch.bfloat16, CPU).wide == (asked != "stored")
    assert forward_dtype(torch.float16, CPU, compares=True).wide == (asked != "stored")
    assert forward_dtype(torch.float32, CPU) == Forward()
    assert forward_dtype(torch.bfloat16, torch.device("cuda")) == Forward()


def test_an_unknown_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_FORWARD", "bf16")
    with pytest.raises(ValueError, match=r"one of auto, fp32, stored, got 'bf16'"):
        forward_dtype(torch.float32, CPU)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("also", ["", " and attention"])
def test_products_of_an_fp32_model_are_computed_in_bf16_where_that_is_faster(
    flag: str, also: str, processor: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(flag)
    monkeypatch.setattr(precision, "has_attention", lambda: bool(also))
    found = forward_dtype(torch.float32, CPU)
    assert (found.dtype, found.products) == (None, torch.bfloat16)
    assert found.reason == (
        f"batches are computed in float32, products of Linear layers{also} in bfloat16, which "
        f"this CPU multiplies ({flag})"
    )
    x = torch.rand(2, 3) / 3
    assert_close(found.multiplied(x), x.bfloat16(), rtol=0, atol=0)
    ids = torch.arange(3)
    assert found.multiplied(ids) is ids
    assert forward_dtype(torch.float32, CPU, compares=True) == Forward()
    assert forward_dtype(torch.float64, CPU) == Forward()
    processor()
    assert forward_dtype(torch.float32, CPU) == Forward()
    assert Forward().multiplied(x) is x


class Router(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).softmax(-1)


def test_layers_multiply_in_bf16_inside() -> None:
    torch.manual_seed(3)
    plain, biased, router = Linear(64, 32, bias=False), Linear(32, 16), Router(16, 4)
    block = torch.nn.Sequential(plain, torch.nn.LayerNorm(32), biased, router)
    x = torch.randn(5, 64)
    wide = block(x)
    with multiplying_in(block, torch.bfloat16):
        y = torch.nn.functional.linear(x.bfloat16(), plain.weight.bfloat16()).float()
        assert_close(plain(x), y, rtol=0, atol=0)
        hidden = block[:3](x)
        assert hidden.dtype == torch.float32
        assert_close(router(hidden), Linear.forward(router, hidden).softmax(-1), rtol=0, atol=0)
        assert is_plain_linear(plain) and not is_plain_linear(router)
        copied = copy.deepcopy(plain)
        with multiplying_in(block, None):
            assert_close(block(x), wide, rtol=0, atol=0)
        assert_close(plain(x), y, rtol=0, atol=0)
    assert_close(block(x), wide, rtol=0, atol=0)
    assert {type(plain), type(biased), type(router)} == {Linear, Router}
    assert_close(copied(x), y, rtol=0, atol=0)


def test_an_error_ends_the_products_in_bf16() -> None:
    linear = Linear(4, 4)
    with pytest.raises(KeyError), multiplying_in(linear, torch.bfloat16):
        raise KeyError
    assert type(linear) is Linear
