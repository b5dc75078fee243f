"""Statistics merge as if observed in one go, and observing again what is known adds nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import distributed as dist

from steelyard.errors import ImportanceWarning, StatisticsError
from steelyard.observers import Observer

HIDDEN, GROUP = 8, 4
NUMBERS = st.floats(-100, 100, width=16)
TOKENS = st.integers(1, 3).flatmap(lambda n: arrays(np.float32, (1, n, HIDDEN), elements=NUMBERS))
RUNS = st.lists(TOKENS, min_size=1, max_size=3)

CLASSES = {
    name: cls
    for name in Observer.registered_names()
    if (cls := Observer.get_value_from_registry(name)).__module__.startswith("steelyard.")
}
"""The package's own observers: other tests register some too, which need not merge well."""
MERGING = [name for name, cls in CLASSES.items() if cls._act_sync_dict]
BY_IMPORTANCE = [name for name in MERGING if "_imatrix_sum" in CLASSES[name]._act_sync_dict]
BY_RANGE = [name for name in MERGING if name not in BY_IMPORTANCE]
EXTREMES = [
    name
    for name in BY_RANGE
    if set(CLASSES[name]._act_sync_dict.values()) <= {dist.ReduceOp.MIN, dist.ReduceOp.MAX}
]
WITHOUT_MEMORY = [name for name in CLASSES if name not in MERGING]

ARGS = {
    "tensor": QuantizationArgs(num_bits=8, symmetric=False, strategy="tensor"),
    "group": QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP),
    "tensor_group": QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=GROUP,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    ),
}
every_strategy = pytest.mark.parametrize("strategy", ARGS)


def test_the_lists_are_whole() -> None:
    assert {"static_minmax", "minmax", "mse"} <= set(BY_RANGE)
    assert "static_minmax" in EXTREMES
    assert "imatrix_mse" in BY_IMPORTANCE
    assert {"memoryless_minmax", "memoryless_mse"} <= set(WITHOUT_MEMORY)


def build(name: str, strategy: str, **options) -> Observer:
    # a moving average with a constant this large shows an error in any weight
    declared = getattr(CLASSES[name].Options, "model_fields", {})
    for option, usual in {"averaging_constant": 0.3, "grid": 20}.items():
        if option in declared:
            options.setdefault(option, usual)
    return Observer.load_from_registry(name, base_name="input", args=ARGS[strategy], **options)


def observed(name: str, strategy: str, run, **options) -> Observer:
    observer = build(name, strategy, **options)
    for value in run:
        observer(torch.from_numpy(value))
    return observer


def assert_alike(actual: Observer, expected: Observer) -> None:
    assert actual.num_updates == expected.num_updates
    assert actual.num_observed_tokens == expected.num_observed_tokens
    assert actual.observed_dtype == expected.observed_dtype
    torch.testing.assert_close(actual.get_statistics(), expected.get_statistics(), rtol=0, atol=0)


@every_strategy
@pytest.mark.parametrize("name", BY_RANGE)
@settings(max_examples=25)
@given(first=RUNS, second=RUNS)
def test_merging_is_going_on_to_observe(name: str, strategy: str, first, second) -> None:
    merged = observed(name, strategy, first)
    other = observed(name, strategy, second)
    before = {k: v.clone() for k, v in other.get_statistics().items()}
    assert merged.merge(other) is merged
    in_one_go = observed(name, strategy, [*first, *second])
    assert_alike(merged, in_one_go)
    torch.testing.assert_close(other.get_statistics(), before, rtol=0, atol=0)

    # and it goes on from there, without touching the other
    merged(torch.from_numpy(second[0]))
    in_one_go(torch.from_numpy(second[0]))
    assert_alike(merged, in_one_go)
    torch.testing.assert_close(other.get_statistics(), before, rtol=0, atol=0)


@every_strategy
@pytest.mark.parametrize("name", BY_RANGE)
@settings(max_examples=15)
@given(parts=st.tuples(RUNS, RUNS, RUNS))
def test_merging_is_associative(name: str, strategy: str, parts) -> None:
    run = [value for part in parts for value in part]
    a, b, c = (observed(name, strategy, part) for part in parts)
    left = a.merge(b).merge(c)
    a, b, c = (observed(name, strategy, part) for part in parts)
    right = a.merge(b.merge(c))
    assert_alike(left, right)
    assert_alike(left, observed(name, strategy, run))


@every_strategy
@pytest.mark.parametrize("name", BY_RANGE)
@settings(max_examples=10)
@given(run=RUNS)
def test_nothing_observed_is_neutral(name: str, strategy: str, run) -> None:
    expected = observed(name, strategy, run)
    assert_alike(observed(name, strategy, run).merge(build(name, strategy)), expected)
    taken_over = build(name, strategy).merge(source := observed(name, strategy, run))
    assert_alike(taken_over, expected)
    taken_over.merge(observed(name, strategy, [value + 1 for value in run]))
    assert_alike(source, expected)  # a copy was taken


@every_strategy
@pytest.mark.parametrize("name", EXTREMES)
@settings(max_examples=50)
@given(parts=st.lists(TOKENS, min_size=2, max_size=4))
def test_merging_is_observing_the_concatenation(name: str, strategy: str, parts) -> None:
    merged = observed(name, strategy, parts[:1])
    for part in parts[1:]:
        merged.merge(observed(name, strategy, [part]))
    whole = observed(name, strategy, [np.concatenate(parts, axis=1)])
    assert merged.num_observed_tokens == whole.num_observed_tokens
    torch.testing.assert_close(merged.get_statistics(), whole.get_statistics(), rtol=0, atol=0)
    for key, expected in whole.get_qparams().items():
        if expected is not None:
            torch.testing.assert_close(merged.get_qparams()[key], expected, rtol=0, atol=0)


def average_by_hand(run, constant: float) -> tuple[float, float]:
    low, high = float(run[0].min()), float(run[0].max())
    for value in run[1:]:
        low = (1 - constant) * low + constant * float(value.min())
        high = (1 - constant) * high + constant * float(value.max())
    return low, high


@given(
    first=RUNS,
    second=RUNS,
    constant=st.floats(0.015625, 1, width=16),
)
@settings(max_examples=50)
def test_moving_average_is_the_textbook_one(first, second, constant: float) -> None:
    merged = observed("minmax", "tensor", first, averaging_constant=constant)
    merged.merge(observed("minmax", "tensor", second, averaging_constant=constant))
    low, high = average_by_hand([*first, *second], constant)
    torch.testing.assert_close(merged.min_vals, torch.tensor([low]), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(merged.max_vals, torch.tensor([high]), rtol=1e-5, atol=1e-4)


# -- importance -----------------------------------------------------------------------------

WEIGHT_ARGS = QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP)


def gathered(name: str, run) -> Observer:
    observer = Observer.load_from_registry(name, base_name="weight", args=WEIGHT_ARGS)
    module = torch.nn.Linear(HIDDEN, 1, bias=False)
    observer.attach(module)
    for value in run:
        module(torch.from_numpy(value))
    observer.detach(module)
    return observer


def assert_same_importance(actual: Observer, run) -> None:
    tokens = np.concatenate([value.reshape(-1, HIDDEN) for value in run]).astype(np.float64)
    assert int(actual._imatrix_count) == len(tokens)
    np.testing.assert_allclose(actual._imatrix_sum.numpy(), (tokens**2).sum(0), rtol=1e-5)


@pytest.mark.parametrize("name", BY_IMPORTANCE)
@settings(max_examples=25)
@given(parts=st.tuples(RUNS, RUNS, RUNS), weight=arrays(np.float32, (2, HIDDEN), elements=NUMBERS))
def test_importance_adds_up(name: str, parts, weight) -> None:
    run = [value for part in parts for value in part]
    a, b, c = (gathered(name, part) for part in parts)
    left = a.merge(b).merge(c)
    a, b, c = (gathered(name, part) for part in parts)
    right = a.merge(b.merge(c))
    for merged in (left, right, gathered(name, run)):
        assert_same_importance(merged, run)
    assert_same_importance(b, parts[1] + parts[2])
    assert_same_importance(c, parts[2])

    if any(value.any() for value in run):  # all-zero importance is refused, by another test
        alone = gathered(name, run)(torch.from_numpy(weight))
        merged = left(torch.from_numpy(weight))
        torch.testing.assert_close(merged.absmax, alone.absmax, rtol=0, atol=0)
        assert merged.fallback_reason is None


@pytest.mark.parametrize("name", BY_IMPORTANCE)
def test_range_found_before_a_merge_is_dropped(name: str) -> None:
    run = [np.ones((1, 2, HIDDEN), np.float32)]
    observer = gathered(name, run)(torch.eye(HIDDEN))
    assert observer.has_statistics
    observer.merge(gathered(name, run))
    assert not observer.has_statistics
    with pytest.raises(AssertionError, match="No statistics available"):
        observer.get_qparams()
    assert observer(torch.eye(HIDDEN)).has_statistics


# -- idempotence ----------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("name", [*EXTREMES, *WITHOUT_MEMORY])
@settings(max_examples=25)
@given(value=TOKENS)
def test_observing_twice_changes_nothing(name: str, strategy: str, value) -> None:
    once, twice = observed(name, strategy, [value]), observed(name, strategy, [value, value])
    torch.testing.assert_close(twice.get_statistics(), once.get_statistics(), rtol=0, atol=0)
    first, second = once.get_qparams(), twice.get_qparams()
    again = twice.get_qparams()
    for key, expected in first.items():
        if expected is not None:
            torch.testing.assert_close(second[key], expected, rtol=0, atol=0)
            torch.testing.assert_close(again[key], expected, rtol=0, atol=0)


@every_strategy
@pytest.mark.parametrize("name", BY_RANGE)
@settings(max_examples=10)
@given(value=TOKENS)
def test_average_of_equal_values_is_that_value(name: str, strategy: str, value) -> None:
    once, thrice = observed(name, strategy, [value]), observed(name, strategy, [value] * 3)
    largest = float(np.abs(value).max())
    for key in CLASSES[name]._statistics:
        before, after = getattr(once, key), getattr(thrice, key)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6 * largest)


@pytest.mark.parametrize("name", BY_IMPORTANCE)
def test_observing_a_weight_twice_changes_nothing(name: str) -> None:
    weight = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    observer = gathered(name, [np.ones((1, 2, HIDDEN), np.float32)])
    first = observer(weight).get_qparams()
    second = observer(weight).get_qparams()
    for key in ("scale", "zero_point"):
        torch.testing.assert_close(second[key], first[key], rtol=0, atol=0)


@every_strategy
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
@settings(max_examples=15)
@given(run=RUNS)
def test_only_the_last_value_counts(name: str, strategy: str, run) -> None:
    last = observed(name, strategy, run[-1:])
    all_of_them = observed(name, strategy, run)
    torch.testing.assert_close(all_of_them.get_statistics(), last.get_statistics(), rtol=0, atol=0)


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_without_memory_there_is_nothing_to_merge(name: str) -> None:
    value = np.ones((1, 1, HIDDEN), np.float32)
    with pytest.raises(StatisticsError, match="nothing to merge"):
        observed(name, "tensor", [value]).merge(observed(name, "tensor", [value]))


def test_without_importance_it_says_so() -> None:
    observer = Observer.load_from_registry("imatrix_mse", base_name="weight", args=WEIGHT_ARGS)
    with pytest.warns(ImportanceWarning, match="importance is missing"):
        observer(torch.eye(HIDDEN))
    assert observer.fallback_reason == "importance is missing"
