"""The search as an observer: its options, its memory, and its part in a fused group."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from nvfp4 import nvfp4
from torch.testing import assert_close

from steelyard.errors import StatisticsError
from steelyard.kernels.grid_search import search_range, shrink_factors
from steelyard.kernels.qparams import global_scale_of, qparams_from_range
from steelyard.observers import (
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MovingAverageMSEObserver,
    Observer,
)
from steelyard.observers.helpers import flatten_for_calibration

INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
INT4_TENSOR = QuantizationArgs(num_bits=4, strategy="tensor")
NVFP4 = nvfp4()


def searched(
    observer: Any, x: torch.Tensor, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range that the kernel finds with the observer's options."""
    return search_range(
        flatten_for_calibration(x, observer.base_name, observer.args),
        observer.args,
        observer.args.scale_dtype or x.dtype,
        shrink_factors(observer.maxshrink, observer.grid),
        observer.norm,
        patience=observer.patience,
        global_scale=global_scale,
    )


# -- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [MemorylessMSEObserver, MovingAverageMSEObserver])
def test_defaults_are_attributes(cls: type[Observer]) -> None:
    observer = cls("weight", INT4)
    assert (observer.maxshrink, observer.patience) == (0.20, 5)
    assert (observer.grid, observer.norm) == (100.0, 2.4)


def test_average_has_its_constant_too() -> None:
    assert MovingAverageMSEObserver("input", INT4).avg_constant == 0.01
    assert MovingAverageMSEObserver("input", INT4, averaging_constant=0.5).avg_constant == 0.5


@pytest.mark.parametrize("cls", [MemorylessMSEObserver, MovingAverageMSEObserver])
@pytest.mark.parametrize(
    "option", [{"maxshrink": 0.1}, {"patience": 1}, {"grid": 10.0}, {"norm": 1.0}]
)
def test_each_option_reaches_the_search(cls: type[Observer], option: dict[str, Any]) -> None:
    # values for which each of the options leads to another range
    value = torch.randn(1, 200, generator=torch.Generator().manual_seed(2))
    usual = {"maxshrink": 0.4}
    observer = cls("input", INT4_TENSOR, **{**usual, **option})(value)
    found = (observer.min_vals, observer.max_vals)
    assert {name: getattr(observer, name) for name in option} == option
    assert_close(found, searched(observer, value), rtol=0, atol=0)
    without = cls("input", INT4_TENSOR, **usual)(value)
    assert not torch.equal(observer.max_vals, without.max_vals)


def test_search_beats_the_whole_range_on_its_own_objective() -> None:
    weight = torch.randn(64, 64)
    scales = {
        cls: cls("weight", INT4)(weight).get_qparams()["scale"]
        for cls in (MemorylessMinMaxObserver, MemorylessMSEObserver)
    }
    groups = weight.reshape(64, 2, 32)
    errors = {
        cls: (groups - (groups / s[..., None]).round().clamp(-8, 7) * s[..., None])
        .abs()
        .pow(2.4)
        .sum(-1)
        for cls, s in scales.items()
    }
    gain = errors[MemorylessMinMaxObserver] - errors[MemorylessMSEObserver]
    assert gain.min() >= -1e-5
    assert gain.mean() > 0.01


# -- memory -------------------------------------------------------------------------------------


def test_memoryless_keeps_the_last() -> None:
    first, second = torch.randn(4, 64), torch.randn(4, 64) * 3
    observer = MemorylessMSEObserver("weight", INT4)(first)(second)
    alone = MemorylessMSEObserver("weight", INT4)(second)
    assert_close(observer.get_qparams(), alone.get_qparams(), rtol=0, atol=0)


def test_average_is_of_the_ranges_found() -> None:
    first, second, third = torch.randn(3, 5, 8)
    observer = MovingAverageMSEObserver("input", INT4_TENSOR, averaging_constant=0.25)
    (low, high), (low2, high2), (low3, high3) = (
        searched(observer, x) for x in (first, second, third)
    )
    observer(first)
    assert_close((observer.min_vals, observer.max_vals), (low, high))
    observer(second)(third)
    assert_close(observer.min_vals, 0.75 * (0.75 * low + 0.25 * low2) + 0.25 * low3)
    assert_close(observer.max_vals, 0.75 * (0.75 * high + 0.25 * high2) + 0.25 * high3)


def test_global_scale_comes_from_the_values_not_from_the_shrunk_range() -> None:
    weight = torch.randn(8, 64)
    for cls in (MemorylessMSEObserver, MovingAverageMSEObserver):
        global_scale = cls("weight", NVFP4)(weight).get_qparams()["global_scale"]
        # E4M3 reaches 448 and E2M1 reaches 6
        assert_close(global_scale, 448 * 6 / weight.abs().max().reshape(1))


# -- fused weights ------------------------------------------------------------------------------


def fused(*weights: torch.Tensor, cls: type[Observer] = MemorylessMSEObserver) -> list[Observer]:
    observers = [cls("weight", NVFP4)(weight) for weight in weights]
    Observer.fuse(observers)
    return observers


def test_fused_weights_are_searched_with_the_shared_global_scale() -> None:
    small, large = torch.randn(32, 64) * 0.13, torch.randn(32, 64) * 0.9
    observers = fused(small, large)
    shared = global_scale_of(large.abs().max())
    for observer, weight in zip(observers, (small, large), strict=True):
        qparams = observer.get_qparams()
        assert_close(qparams["global_scale"], shared, rtol=0, atol=0)
        low, high = searched(observer, weight, shared)
        expected, _ = qparams_from_range(low, high, NVFP4, NVFP4.scale_dtype, shared)
        assert_close(qparams["scale"], expected, rtol=0, atol=0)
    # and that is not what the weight's own global scale would have led to
    low, high = searched(observers[0], small, global_scale_of(small.abs().max()))
    own, _ = qparams_from_range(low, high, NVFP4, NVFP4.scale_dtype, shared)
    assert not torch.equal(observers[0].get_qparams()["scale"], own)


def test_asking_a_fused_weight_twice_gives_the_same() -> None:
    observers = fused(torch.randn(8, 32), torch.randn(8, 32) * 7)
    first = [observer.get_qparams() for observer in observers]
    again = [observer.get_qparams() for observer in reversed(observers)]
    assert_close(first, again[::-1], rtol=0, atol=0)


@pytest.mark.parametrize("as_parameter", [True, False])
def test_weight_modified_before_its_second_search_is_an_error(as_parameter: bool) -> None:
    small, large = torch.randn(8, 32), torch.randn(8, 32) * 7
    if as_parameter:
        small, large = torch.nn.Parameter(small), torch.nn.Parameter(large)
    observers = fused(small, large)
    observers[0].module_name = "layers.0.self_attn.k_proj"
    with torch.no_grad():
        small.mul_(2)
        large.mul_(2)
    with pytest.raises(StatisticsError, match=r"layers\.0\.self_attn\.k_proj .* was modified"):
        observers[0].get_qparams()
    # the largest of the group needs no second search: its own global scale is the shared one
    expected = MemorylessMSEObserver("weight", NVFP4)(large.detach() / 2).get_qparams()
    assert_close(observers[1].get_qparams(), expected, rtol=0, atol=0)


def test_weight_alone_may_be_modified_after_observing() -> None:
    weight = torch.randn(8, 32)
    observer = MemorylessMSEObserver("weight", NVFP4)(weight)
    before = observer.get_qparams()
    weight.zero_()
    assert_close(observer.get_qparams(), before, rtol=0, atol=0)


def test_fused_weights_may_be_observed_in_inference_mode() -> None:
    small, large = torch.randn(8, 32), torch.randn(8, 32) * 7
    expected = [observer.get_qparams() for observer in fused(small, large)]
    with torch.inference_mode():
        observers = fused(small.clone(), large.clone())
        assert_close([o.get_qparams() for o in observers], expected, rtol=0, atol=0)
    assert_close([o.get_qparams() for o in observers], expected, rtol=0, atol=0)


def worn(weight: torch.Tensor) -> torch.Tensor:
    """Write a weight several times, as initialising and loading it do."""
    for _ in range(4):
        weight.mul_(1.5)
    return weight


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        pytest.param(
            lambda observers: pickle.loads(pickle.dumps(observers)),
        ),
    ],
    ids=["deepcopy", "pickle"],
)
def test_copies_of_fused_observers_know_that_nothing_was_modified(
    duplicate: Callable[[list[Observer]], list[Observer]],
) -> None:
    observers = fused(worn(torch.randn(8, 32)), worn(torch.randn(8, 32) * 7))
    expected = [observer.get_qparams() for observer in observers]
    copied = duplicate(observers)
    assert_close([observer.get_qparams() for observer in copied], expected, rtol=0, atol=0)


def test_observer_of_a_weight_that_was_modified_since_can_be_copied() -> None:
    small, large = worn(torch.randn(8, 32)), worn(torch.randn(8, 32) * 7)
    observers = fused(small, large)
    small.zero_()
    copied = copy.deepcopy(observers)
    with pytest.raises(StatisticsError, match="was modified after it was observed"):
        copied[0].get_qparams()


def test_reset_lets_go_of_the_weight() -> None:
    observer = MemorylessMSEObserver("weight", NVFP4)(torch.randn(8, 32))
    observer.reset()
    assert observer._kept is None
    assert MemorylessMSEObserver("input", NVFP4)(torch.randn(8, 32))._kept is None
    assert MemorylessMSEObserver("weight", INT4)(torch.randn(8, 32))._kept is None
