"""Shapes: the canonical form of every value, blocks that do not divide, and group orders."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch.testing import assert_close

from steelyard.errors import StrategyError
from steelyard.observers import MemorylessMinMaxObserver, MemorylessMSEObserver, Observer
from steelyard.observers.helpers import (
    STRATEGIES,
    count_tokens,
    flatten_for_calibration,
    get_observer_token_count,
)

FIELDS: dict[str, dict[str, Any]] = {
    "group": {"group_size": 4},
    "tensor_group": {"group_size": 4},
    "block": {"block_structure": [2, 4]},
    "token": {"dynamic": True},
}


def args_for(strategy: str, **fields: Any) -> QuantizationArgs:
    return QuantizationArgs(strategy=strategy, **{**FIELDS.get(strategy, {}), **fields})


# -- flatten_for_calibration --------------------------------------------------------------------

Slices = Callable[[np.ndarray], np.ndarray]
"""From a value to an object array of qparam_shape, each entry the elements of one parameter."""


def parts(shape: tuple[int, ...], pick: Callable[..., np.ndarray]) -> np.ndarray:
    """Return an object array whose entry at each index is `pick(*index)`."""
    found = np.empty(shape, dtype=object)
    for index in np.ndindex(shape):
        found[index] = pick(*index)
    return found


CASES: list[tuple[str, str, tuple[int, ...], tuple[int, ...], Slices]] = [
    # base name, strategy, shape of the value, documented shape of the result, the slices
    ("weight", "tensor", (6, 8), (1, 1, 48), lambda x: parts((1,), lambda _: x)),
    ("weight", "channel", (6, 8), (1, 6, 1, 8), lambda x: parts((6, 1), lambda i, _: x[i])),
    (
        "weight",
        "group",
        (6, 8),
        (1, 6, 2, 4),
        lambda x: parts((6, 2), lambda i, g: x[i, 4 * g : 4 * g + 4]),
    ),
    (
        "weight",
        "block",
        (6, 8),
        (1, 3, 2, 8),
        lambda x: parts((3, 2), lambda i, j: x[2 * i : 2 * i + 2, 4 * j : 4 * j + 4]),
    ),
    ("weight", "tensor", (3, 6, 8), (1, 1, 144), lambda x: parts((1,), lambda _: x)),
    (
        "weight",
        "channel",
        (3, 6, 8),
        (1, 3, 6, 1, 8),
        lambda x: parts((3, 6, 1), lambda e, i, _: x[e, i]),
    ),
    (
        "weight",
        "group",
        (3, 6, 8),
        (1, 3, 6, 2, 4),
        lambda x: parts((3, 6, 2), lambda e, i, g: x[e, i, 4 * g : 4 * g + 4]),
    ),
    ("weight", "channel", (8,), (1, 1, 8), lambda x: parts((1,), lambda _: x)),
    ("input", "tensor", (2, 3, 8), (6, 1, 8), lambda x: parts((1,), lambda _: x)),
    ("input", "tensor", (5, 8), (5, 1, 8), lambda x: parts((1,), lambda _: x)),
    (
        "input",
        "token",
        (2, 3, 8),
        (1, 2, 3, 1, 8),
        lambda x: parts((2, 3, 1), lambda b, s, _: x[b, s]),
    ),
    ("input", "token", (5, 8), (1, 5, 1, 8), lambda x: parts((5, 1), lambda t, _: x[t])),
    (
        "input",
        "group",
        (2, 3, 8),
        (6, 2, 4),
        lambda x: parts((2,), lambda g: x[..., 4 * g : 4 * g + 4]),
    ),
    (
        "input",
        "group",
        (5, 8),
        (5, 2, 4),
        lambda x: parts((2,), lambda g: x[:, 4 * g : 4 * g + 4]),
    ),
    ("q", "tensor", (2, 3, 5, 8), (10, 1, 24), lambda x: parts((1,), lambda _: x)),
    (
        "q",
        "attn_head",
        (2, 3, 5, 8),
        (10, 3, 1, 1, 8),
        lambda x: parts((3, 1, 1), lambda h, *_: x[:, h]),
    ),
]
ALIKE = {"weight": ["weight"], "input": ["input", "output"], "q": ["q", "k", "v"]}
EXPANDED = [
    (base_name, strategy, *rest)
    for kind, listed, *rest in CASES
    for base_name in ALIKE[kind]
    for strategy in ([listed, "tensor_group"] if listed == "group" else [listed])
]


@pytest.mark.parametrize(
    ("base_name", "strategy", "shape", "expected_shape", "slices"),
    EXPANDED,
    ids=[f"{case[0]}-{case[1]}-{len(case[2])}d" for case in EXPANDED],
)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed"])
def test_each_parameter_gets_its_own_elements(
    base_name: str,
    strategy: str,
    shape: tuple[int, ...],
    expected_shape: tuple[int, ...],
    slices: Slices,
    contiguous: bool,
) -> None:
    value = torch.randn(shape)
    if not contiguous:
        value = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    flat = flatten_for_calibration(value, base_name, args_for(strategy))
    assert flat.shape == expected_shape
    elements = slices(value.numpy())
    assert elements.shape == flat.shape[1:-1]
    for index in np.ndindex(elements.shape):
        got = np.sort(flat.numpy()[(slice(None), *index)], axis=None)
        np.testing.assert_array_equal(got, np.sort(elements[index], axis=None))
    low = np.vectorize(np.min, otypes=[np.float32])(elements)
    high = np.vectorize(np.max, otypes=[np.float32])(elements)
    assert_close(flat.amin(dim=(0, -1)), torch.from_numpy(low), rtol=0, atol=0)
    assert_close(flat.amax(dim=(0, -1)), torch.from_numpy(high), rtol=0, atol=0)


def test_every_pair_that_is_allowed_is_tested_above() -> None:
    tested = {(base_name, strategy) for base_name, strategy, *_ in EXPANDED}
    assert tested == {(name, strategy) for name in STRATEGIES for strategy in STRATEGIES[name]}


WRONG = [
    (name, strategy.value)
    for name in STRATEGIES
    for strategy in QuantizationStrategy
    if strategy.value not in STRATEGIES[name]
]


@pytest.mark.parametrize(("base_name", "strategy"), WRONG)
@pytest.mark.parametrize("how", ["flatten", "construct"])
def test_wrong_pair_says_what_is_possible(base_name: str, strategy: str, how: str) -> None:
    args = args_for(strategy)
    possible = ", ".join(STRATEGIES[base_name])
    message = f"{strategy!r} cannot quantize a value of kind {base_name!r}: use {possible}"
    with pytest.raises(ValueError, match=re.escape(message)):
        if how == "flatten":
            flatten_for_calibration(torch.randn(2, 2, 8, 8), base_name, args)
        else:
            MemorylessMinMaxObserver(base_name, args)


def test_unknown_base_name_lists_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="'bias': a value is one of weight, input, output, q"):
        flatten_for_calibration(torch.randn(2, 2), "bias", args_for("tensor"))


@pytest.mark.parametrize("strategy", ["group", "tensor_group"])
@pytest.mark.parametrize("base_name", ["weight", "input", "output"])
def test_group_that_does_not_divide_is_refused(base_name: str, strategy: str) -> None:
    with pytest.raises(
        StrategyError, match=r"shape \(2, 10\) does not divide into groups of 4.*divides 10"
    ):
        flatten_for_calibration(torch.randn(2, 10), base_name, args_for(strategy))


@pytest.mark.parametrize("shape", [(8,), (2, 4, 8)])
def test_block_needs_a_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(StrategyError, match=re.escape(f"two dimensions, got shape {shape}")):
        flatten_for_calibration(torch.randn(shape), "weight", args_for("block"))


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (1, 2, 3, 5, 8)])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_attention_state_needs_four_dimensions(shape: tuple[int, ...], strategy: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(f"seq, head_dim), got {shape}")):
        flatten_for_calibration(torch.randn(shape), "k", args_for(strategy))


# -- blocks that do not divide ------------------------------------------------------------------


def cropped(weight: torch.Tensor, height: int, width: int) -> list[list[torch.Tensor]]:
    """Cut a weight into blocks; those at the right and at the bottom may be smaller."""
    return [list(strip.split(width, dim=1)) for strip in weight.split(height, dim=0)]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_bits": 8, "type": "float"},
        {"num_bits": 8, "type": "int"},
        {"num_bits": 4, "type": "int", "symmetric": False},
    ],
)
@pytest.mark.parametrize("shape", [(4, 8), (5, 8), (4, 10), (7, 9), (1, 1)])
@pytest.mark.parametrize("offset", [-5.0, 0.0, 5.0], ids=["negative", "mixed", "positive"])
@pytest.mark.parametrize("cls", [MemorylessMinMaxObserver, MemorylessMSEObserver])
def test_padding_leaves_the_parameters_of_a_block_alone(
    cls: type[Observer], offset: float, shape: tuple[int, int], fields: dict[str, Any]
) -> None:
    # patience counts steps over the whole tensor, so the search of a block alone may stop earlier
    options = {"patience": 0} if cls is MemorylessMSEObserver else {}
    weight = torch.randn(shape) + offset
    whole = cls("weight", args_for("block", block_structure=[2, 4], **fields), **options)
    scale, zero_point = whole(weight)
    alone = [
        [tuple(cls("weight", args_for("tensor", **fields), **options)(block)) for block in strip]
        for strip in cropped(weight, 2, 4)
    ]
    assert_close(scale, torch.stack([torch.cat([s for s, _ in strip]) for strip in alone]))
    assert_close(zero_point, torch.stack([torch.cat([z for _, z in strip]) for strip in alone]))


def test_padded_blocks_hold_the_weight_and_zeros() -> None:
    weight = torch.randn(5, 6)
    flat = flatten_for_calibration(weight, "weight", args_for("block", block_structure=[4, 4]))
    assert flat.shape == (1, 2, 2, 16)
    assert int((flat != 0).sum()) == weight.numel()
    assert_close(flat.sum(), weight.sum())
    assert_close(flat[0, 1, 1, :2], weight[4, 4:])


# -- group order --------------------------------------------------------------------------------


def shuffled_groups(columns: int, group_size: int, seed: int) -> torch.Tensor:
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    return order // group_size


@pytest.mark.parametrize("strategy", ["group", "tensor_group"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group_index_gathers_the_columns_of_a_group(strategy: str, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 24)
    g_idx = shuffled_groups(24, 4, seed=0).to(dtype)
    observer = MemorylessMinMaxObserver("weight", args_for(strategy))
    observer(weight, g_idx=g_idx)
    values, groups = weight.numpy(), g_idx.numpy()
    low = np.stack([values[:, groups == g].min(axis=1) for g in range(6)], axis=1)
    high = np.stack([values[:, groups == g].max(axis=1) for g in range(6)], axis=1)
    assert_close(observer.min_vals, torch.from_numpy(low), rtol=0, atol=0)
    assert_close(observer.max_vals, torch.from_numpy(high), rtol=0, atol=0)


def test_group_index_enters_the_search() -> None:
    weight = torch.randn(5, 24)
    g_idx = shuffled_groups(24, 4, seed=1)
    args = args_for("group", num_bits=4)
    ordered = MemorylessMSEObserver("weight", args)(weight, g_idx).get_qparams()
    sorted_by_hand = weight[:, np.argsort(g_idx.numpy(), kind="stable")]
    expected = MemorylessMSEObserver("weight", args)(sorted_by_hand).get_qparams()
    unordered = MemorylessMSEObserver("weight", args)(weight).get_qparams()
    assert_close(ordered, expected, rtol=0, atol=0)
    assert not torch.equal(ordered["scale"], unordered["scale"])


def test_group_index_not_yet_set_means_the_stored_order() -> None:
    weight = torch.randn(5, 24)
    unset = torch.full((24,), -1, dtype=torch.int32)
    with_index = MemorylessMinMaxObserver("weight", args_for("group"))(weight, g_idx=unset)
    without = MemorylessMinMaxObserver("weight", args_for("group"))(weight)
    assert_close(with_index.get_qparams(), without.get_qparams(), rtol=0, atol=0)


def test_group_index_belongs_to_one_observation() -> None:
    weight = torch.randn(5, 24)
    observer = MemorylessMSEObserver("weight", args_for("group"))
    observer(weight, g_idx=shuffled_groups(24, 4, seed=2))
    observer(weight)
    expected = MemorylessMSEObserver("weight", args_for("group"))(weight).get_qparams()
    assert_close(observer.get_qparams(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("base_name", "strategy"),
    [("weight", "tensor"), ("weight", "channel"), ("weight", "block"), ("input", "group")],
)
def test_group_index_is_for_grouped_weights(base_name: str, strategy: str) -> None:
    observer = MemorylessMinMaxObserver(base_name, args_for(strategy))
    message = f"strategy group or tensor_group, got {base_name!r} with {strategy!r}"
    with pytest.raises(StrategyError, match=re.escape(message)):
        observer(torch.randn(4, 8), g_idx=torch.arange(8) // 4)


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        ([0, 0, 0, 0], "g_idx has shape (4,), but the weight has 8 columns"),
        ([[0, 0, 0, 0, 1, 1, 1, 1]], "g_idx has shape (1, 8), but the weight has 8 columns"),
        ([0, 0, 0, 1, 1, 1, 1, 1], "got groups of [3, 5] columns, and 0 columns without a group"),
        ([0, 0, 0, 0, 2, 2, 2, 2], "got groups of [0, 4] columns"),
        ([0, 0, 0, 0, 1, 1, 1, -1], "and 1 columns without a group"),
        ([0] * 8, "exactly 4 columns into each group, got groups of [8] columns"),
    ],
)
def test_bad_group_index_is_refused(g_idx: list[Any], message: str) -> None:
    observer = MemorylessMinMaxObserver("weight", args_for("group"))
    with pytest.raises(StrategyError, match=re.escape(message)):
        observer(torch.randn(4, 8), g_idx=torch.tensor(g_idx))
    assert not observer.has_statistics


# -- counting tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base_name", "shape", "expected"),
    [("weight", (4, 8), 0), ("output", (2, 3, 8), 6), ("k", (2, 4, 3, 8), 6)],
)
def test_count_tokens(base_name: str, shape: tuple[int, ...], expected: int) -> None:
    assert count_tokens(torch.empty(shape), base_name) == expected


def test_model_wide_token_count() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(8, 8)
            self.k_observer = Observer.load_from_registry("minmax", base_name="k", args=tensor)
            self.v_observer = Observer.load_from_registry("minmax", base_name="v", args=tensor)

    tensor = args_for("tensor")
    model = torch.nn.ModuleDict({"attn": Attention(), "unseen": torch.nn.Linear(8, 8)})
    q_proj = model["attn"].q_proj
    q_proj.weight_observer = MemorylessMinMaxObserver("weight", tensor)(q_proj.weight)
    q_proj.input_observer = MemorylessMinMaxObserver("input", tensor)(torch.randn(2, 5, 8))
    q_proj.output_observer = MemorylessMinMaxObserver("output", tensor)(torch.randn(2, 5, 8))
    q_proj.input_observer(torch.randn(1, 3, 8))
    q_proj.output_observer(torch.randn(1, 3, 8))
    for name in ("k_observer", "v_observer"):
        getattr(model["attn"], name)(torch.randn(2, 4, 6, 2))
    model["unseen"].input_observer = MemorylessMinMaxObserver("input", tensor)
    counts = get_observer_token_count(model)
    assert counts == {"attn.q_proj": 13, "attn": 12, "unseen": 0}
    assert "unseen" in counts, "a module that saw nothing is listed, not left out"
    assert get_observer_token_count(torch.nn.Linear(2, 2)) == {}


# -- module paths of the interface --------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("observers", ["Observer", "QParamsDict", "MinMaxObserver", "StaticMinMaxObserver"]),
        ("observers", ["MemorylessMinMaxObserver", "MovingAverageMSEObserver"]),
        ("observers", ["IMatrixMSEObserver", "flatten_for_calibration", "fuse_weight_observers"]),
        ("observers.base", ["Observer", "QParamsDict"]),
        ("observers.helpers", ["flatten_for_calibration", "fuse_weight_observers"]),
        ("observers.helpers", ["FUSED_LAYER_NAMES"]),
        (
            "observers.min_max",
            ["MemorylessMinMaxObserver", "StaticMinMaxObserver", "MinMaxObserver"],
        ),
        ("observers.mse", ["MovingAverageMSEObserver", "MemorylessMSEObserver"]),
        ("observers.imatrix", ["IMatrixMSEObserver"]),
    ],
)
def test_module_paths_of_the_interface_resolve(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"steelyard.{module}")
    top = importlib.import_module("steelyard.observers")
    for name in names:
        value = getattr(found, name)
        assert getattr(top, name, value) is value
