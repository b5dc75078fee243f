"""Smallest and largest value: of the last observation, of all, and as a moving average."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.testing import assert_close

from steelyard.observers import (
    MemorylessMinMaxObserver,
    MinMaxObserver,
    Observer,
    StaticMinMaxObserver,
)

ARGS = QuantizationArgs(num_bits=8, strategy="tensor")
FIRST = torch.tensor([[-2.0, 1.0], [0.5, 4.0]])
SECOND = torch.tensor([[-6.0, 0.0]])
THIRD = torch.tensor([[-1.0, 3.0]])


def range_after(observer: Observer, *values: torch.Tensor) -> tuple[float, float]:
    for value in values:
        observer(value)
    return observer.min_vals.item(), observer.max_vals.item()


def test_memoryless_keeps_the_last() -> None:
    assert range_after(MemorylessMinMaxObserver("input", ARGS), FIRST, SECOND) == (-6.0, 0.0)


def test_static_keeps_the_extremes() -> None:
    assert range_after(StaticMinMaxObserver("input", ARGS), FIRST, SECOND, THIRD) == (-6.0, 4.0)


def test_static_keeps_the_extremes_of_each_group() -> None:
    args = QuantizationArgs(num_bits=8, strategy="group", group_size=2)
    observer = StaticMinMaxObserver("input", args)
    observer(torch.tensor([[-1.0, 2.0, -8.0, 1.0]]))(torch.tensor([[-3.0, 1.0, -4.0, 9.0]]))
    assert_close(observer.min_vals, torch.tensor([-3.0, -8.0]))
    assert_close(observer.max_vals, torch.tensor([2.0, 9.0]))


def test_first_observation_sets_the_average() -> None:
    assert range_after(MinMaxObserver("input", ARGS), FIRST) == (-2.0, 4.0)


def test_average_moves_by_the_constant() -> None:
    observer = MinMaxObserver("input", ARGS, averaging_constant=0.25)
    range_after(observer, FIRST, SECOND)
    assert_close(observer.min_vals, torch.tensor([0.75 * -2.0 + 0.25 * -6.0]))
    assert_close(observer.max_vals, torch.tensor([0.75 * 4.0 + 0.25 * 0.0]))
    observer(THIRD)
    assert_close(observer.min_vals, torch.tensor([0.75 * -3.0 + 0.25 * -1.0]))
    assert_close(observer.max_vals, torch.tensor([0.75 * 3.0 + 0.25 * 3.0]))


def test_default_constant_is_one_in_a_hundred() -> None:
    observer = MinMaxObserver("input", ARGS)
    range_after(observer, FIRST, SECOND)
    assert observer.avg_constant == 0.01
    assert_close(observer.min_vals, torch.tensor([-2.04]))
    assert_close(observer.max_vals, torch.tensor([3.96]))


def test_constant_one_keeps_the_last() -> None:
    observer = MinMaxObserver("input", ARGS, averaging_constant=1.0)
    assert range_after(observer, FIRST, SECOND, THIRD) == (-1.0, 3.0)


def test_constant_may_be_an_integer() -> None:
    assert MinMaxObserver("input", ARGS, averaging_constant=1).avg_constant == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_average_is_kept_in_more_than_the_type_observed(dtype: torch.dtype) -> None:
    # a step of 0.01 from 256 is lost in either type
    observer = MinMaxObserver("input", ARGS)
    range_after(observer, torch.tensor([[-1.0, 256.0]], dtype=dtype))
    range_after(
        observer, torch.tensor([[-1.0, 257.0 if dtype == torch.float16 else 258.0]]).to(dtype)
    )
    expected = 256.01 if dtype == torch.float16 else 256.02
    assert_close(observer.max_vals, torch.tensor([expected]))
    assert observer.get_qparams()["scale"].dtype == dtype


@pytest.mark.parametrize("name", ["memoryless_minmax", "static_minmax", "minmax"])
def test_asymmetric_range_reaches_zero(name: str) -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False)
    scale, zero_point = Observer.load_from_registry(name, base_name="input", args=args)(
        torch.tensor([[2.0, 5.1]])
    )
    assert_close(scale, torch.tensor([5.1 / 255]))
    assert_close(zero_point, torch.tensor([-128], dtype=torch.int8))
