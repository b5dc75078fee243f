"""Moving averages: runs observed apart join into what one observer of all of them holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from nvfp4 import nvfp4
from torch.testing import assert_close

from steelyard.observers import MinMaxObserver, MovingAverageMSEObserver, Observer

CLASSES = [MinMaxObserver, MovingAverageMSEObserver]
CONSTANTS = [0.01, 0.3, 1.0]
ARGS = {
    "tensor": QuantizationArgs(num_bits=8, strategy="tensor"),
    "tensor_group": nvfp4(4),
}
# number of observations in each part, in order
SPLITS = [
    (3,),
    (0,),
    (1, 1),
    (2, 3),
    (0, 2),
    (3, 0),
    (0, 0),
    (1, 4, 2),
    (0, 1, 2),
    (2, 0, 3),
    (2, 1, 0),
    (0, 0, 3),
    (1, 0, 0, 4),
    (0, 2, 0, 1),
    (2, 1, 3, 1),
]


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(3, 8, generator=generator) * (1 + i) for i in range(count)]


def observe(observer: Observer, values: Sequence[torch.Tensor]) -> Observer:
    for value in values:
        observer(value)
    return observer


def cut(values: list[torch.Tensor], sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    remaining = iter(values)
    return [[next(remaining) for _ in range(size)] for size in sizes]


def assert_same(merged: Observer, whole: Observer) -> None:
    assert merged.has_statistics == whole.has_statistics
    assert merged.num_updates == whole.num_updates
    assert merged.num_observed_tokens == whole.num_observed_tokens
    assert_close(merged.get_statistics(), whole.get_statistics(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("strategy", list(ARGS))
@pytest.mark.parametrize("cls", CLASSES)
def test_merging_parts_equals_observing_in_order(
    cls: type[Observer], strategy: str, constant: float, sizes: tuple[int, ...]
) -> None:
    def build() -> Observer:
        return cls("input", ARGS[strategy], averaging_constant=constant)

    values = batches(sum(sizes))
    whole = observe(build(), values)
    left_to_right = [observe(build(), part) for part in cut(values, sizes)]
    assert_same(functools.reduce(lambda a, b: a.merge(b), left_to_right), whole)
    right_to_left = [observe(build(), part) for part in cut(values, sizes)]
    assert_same(functools.reduce(lambda b, a: a.merge(b), reversed(right_to_left)), whole)


@pytest.mark.parametrize("cls", CLASSES)
def test_merged_observer_goes_on_like_the_whole(cls: type[Observer]) -> None:
    values = batches(7)
    first, second = (cls("input", ARGS["tensor"], averaging_constant=0.2) for _ in range(2))
    observe(first, values[:2]).merge(observe(second, values[2:5]))
    whole = observe(cls("input", ARGS["tensor"], averaging_constant=0.2), values)
    assert_same(observe(first, values[5:]), whole)


@pytest.mark.parametrize("cls", CLASSES)
def test_merging_leaves_the_other_as_it_was(cls: type[Observer]) -> None:
    values = batches(4)
    first, second = (cls("input", ARGS["tensor"], averaging_constant=0.2) for _ in range(2))
    observe(second, values[2:])
    before = {name: value.clone() for name, value in second.get_statistics().items()}
    empty = cls("input", ARGS["tensor"], averaging_constant=0.2).merge(second)
    observe(first, values[:2]).merge(second)
    observe(empty, values)
    assert_close(second.get_statistics(), before, rtol=0, atol=0)
    assert second.num_updates == 2


def test_order_matters() -> None:
    values = batches(4)
    first, second = (MinMaxObserver("input", ARGS["tensor"]) for _ in range(2))
    observe(first, values[2:]).merge(observe(second, values[:2]))
    assert not torch.allclose(
        first.max_vals, observe(MinMaxObserver(ARGS["tensor"]), values).max_vals
    )
