"""A search is never worse than min-max by its own objective, judged by NumPy as stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy_oracle as oracle
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.observers import Observer
from steelyard.observers.helpers import flatten_for_calibration

ROWS, COLUMNS = 4, 32
NUMBERS = st.one_of(
    st.floats(-4, 4, width=16),
    st.floats(-60000, 60000, width=16),  # an outlier
    st.sampled_from([0.0, 1.0, -1.0, 2.0**-14]),
)
MATRICES = arrays(np.float32, (ROWS, COLUMNS), elements=NUMBERS, fill=st.floats(-1, 1, width=16))
TIED = np.full((ROWS, COLUMNS), np.float32(0.349609375))
TIED[0, 0] = 311  # so that in NVFP4 the scales 0.5 and 0.75 store all else as 6 x 0.5 = 4 x 0.75
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def _args(bits: int, kind: str, symmetric: bool, strategy: str) -> QuantizationArgs:
    shape: dict[str, Any] = {"group": {"group_size": 16}, "block": {"block_structure": [2, 8]}}
    return QuantizationArgs(
        num_bits=bits,
        type=kind,
        symmetric=symmetric,
        strategy=strategy,
        **shape.get(strategy, {}),
    )


FORMATS = {
    "int2_channel": _args(2, "int", True, "channel"),
    "int3_asym_group": _args(3, "int", False, "group"),
    "int4_group": _args(4, "int", True, "group"),
    "int4_asym_channel": _args(4, "int", False, "channel"),
    "int8_tensor": _args(8, "int", True, "tensor"),
    "int8_asym_block": _args(8, "int", False, "block"),
    "fp8_block": _args(8, "float", True, "block"),
    "fp8_channel": _args(8, "float", True, "channel"),
    **{
        name: preset_name_to_scheme(name, ["Linear"]).weights
        for name in ("NVFP4", "MXFP4", "MXFP8")
    },
}
every_format = pytest.mark.parametrize("args", FORMATS.values(), ids=FORMATS)


def objective(
    value: torch.Tensor, qparams: Any, args: QuantizationArgs, norm: float, importance: Any = None
) -> np.ndarray:
    """Return the error of each group under parameters as they are stored."""
    flat = flatten_for_calibration(value, "weight", args).double().numpy()
    weights: Any = 1.0
    if importance is not None:
        rows = torch.from_numpy(importance).expand(ROWS, -1)
        weights = flatten_for_calibration(rows, "weight", args).double().numpy()
    global_scale = None if qparams["global_scale"] is None else qparams["global_scale"].item()
    scale = oracle.effective_scale(qparams["scale"].double().numpy(), global_scale)
    return oracle.error_of(flat, scale, qparams["zero_point"].double().numpy(), args, norm, weights)


def assert_not_worse(
    ours: np.ndarray,
    theirs: np.ndarray,
    floor: np.ndarray | float = 0,
    size: np.ndarray | float = 0,
    norm: float = 2,
) -> None:
    """Compare up to rounding in fp32; errors below `floor` count as none.

    size: the sum of |w|^norm of each group. A difference w - q is known to 2^-23 |w|, so a sum e of
          their powers p to 2^-23 p sum |w| |w - q|^(p - 1), which is at most
          2^-23 p size^(1/p) e^(1 - 1/p), on either side. It matters where q is close to w.
    """
    rounding = 1e-5 * theirs + 2**-22 * norm * size ** (1 / norm) * theirs ** (1 - 1 / norm)
    worse = ours > theirs + rounding + floor
    assert not worse.any(), f"{ours[worse]} is worse than {theirs[worse]}"


def size_of(
    value: torch.Tensor, args: QuantizationArgs, norm: float, importance: np.ndarray | None
) -> np.ndarray:
    """Return the sum of |w|^norm of each group, weighted as `objective` weights errors."""
    weights = np.ones(COLUMNS) if importance is None else importance
    powers = torch.from_numpy(np.abs(value.double().numpy()) ** norm * weights)
    return flatten_for_calibration(powers, "weight", args).numpy().sum(axis=(0, -1))


def qparams_of(name: str, value: torch.Tensor, args: QuantizationArgs, **options: Any):
    observer = Observer.load_from_registry(name, base_name="weight", args=args, **options)
    return observer(value).get_qparams()


def gather(observer: Observer, activations: np.ndarray) -> None:
    """Let an observer see the inputs of its layer."""
    module = torch.nn.Linear(COLUMNS, 1, bias=False)
    observer.attach(module)
    module(torch.from_numpy(activations))
    observer.detach(module)


@every_format
@settings(max_examples=20)
@given(matrix=MATRICES, dtype=DTYPES, norm=st.sampled_from([1.0, 2.0, 2.4, 4.0]))
def test_memoryless_mse_is_not_worse(args, matrix, dtype, norm) -> None:
    value = torch.from_numpy(matrix).to(dtype)
    plain = qparams_of("memoryless_minmax", value, args)
    for patience in (0, 5):
        found = qparams_of(
            "memoryless_mse", value, args, norm=norm, grid=20, maxshrink=0.8, patience=patience
        )
        assert_not_worse(objective(value, found, args, norm), objective(value, plain, args, norm))


@every_format
@settings(max_examples=20)
@given(
    matrix=MATRICES,
    dtype=DTYPES,
    activations=arrays(np.float32, (3, COLUMNS), elements=st.floats(-8, 8, width=16)),
)
def test_imatrix_mse_is_not_worse(args, matrix, dtype, activations) -> None:
    activations = activations.copy()
    activations[0, 0] = 1  # importance must not be all zero
    value = torch.from_numpy(matrix).to(dtype)
    observer = Observer.load_from_registry("imatrix_mse", base_name="weight", args=args)
    gather(observer, activations)
    found = observer(value).get_qparams()
    importance = (activations.astype(np.float64) ** 2).mean(axis=0)
    importance /= importance.mean()
    plain = qparams_of("memoryless_minmax", value, args)
    assert_not_worse(
        objective(value, found, args, 3.0, importance),
        objective(value, plain, args, 3.0, importance),
        size=size_of(value, args, 3.0, importance),
        norm=3.0,
    )


@every_format
@settings(max_examples=20)
@given(
    matrix=MATRICES,
    dtype=DTYPES,
    activations=arrays(np.float32, (3, COLUMNS), elements=st.floats(-8, 8, width=16)),
    weighed=st.booleans(),
)
@example(matrix=TIED, dtype=torch.bfloat16, activations=np.zeros((3, COLUMNS)), weighed=False)
def test_optimal_is_not_worse_than_either(args, matrix, dtype, activations, weighed) -> None:
    """By the squared error that it minimises, no grid finds a better scale.

    Scales in fp32 are too many to try all, so no such thing is promised of them.
    """
    activations = activations.copy()
    activations[0, 0] = 1
    if args.scale_dtype is None and dtype == torch.float32:
        dtype = torch.bfloat16
    value = torch.from_numpy(matrix).to(dtype)
    observer = Observer.load_from_registry("optimal", base_name="weight", args=args, norm=2.0)
    importance = None
    if weighed:
        gather(observer, activations)
        importance = (activations.astype(np.float64) ** 2).mean(axis=0)
        importance /= importance.mean()
    found = objective(value, observer(value).get_qparams(), args, 2.0, importance)
    size = size_of(value, args, 2.0, importance)
    plain = qparams_of("memoryless_minmax", value, args)
    theirs = objective(value, plain, args, 2.0, importance)
    assert_not_worse(found, theirs, floor=1e-12, size=size)
    if not weighed:
        searched = qparams_of("memoryless_mse", value, args, norm=2.0, patience=0)
        theirs = objective(value, searched, args, 2.0)
        assert_not_worse(found, theirs, floor=1e-12, size=size)


@every_format
@settings(max_examples=20)
@given(
    matrix=MATRICES,
    dtype=DTYPES,
    norm=st.sampled_from([1.0, 1.5, 2.4, 3.0, 3.5, 4.0]),
    activations=arrays(np.float32, (3, COLUMNS), elements=st.floats(-8, 8, width=16)),
    weighed=st.booleans(),
)
def test_optimal_is_not_worse_by_its_norm(args, matrix, dtype, norm, activations, weighed) -> None:
    """By the norm that it minimises, neither the scale of norm 2 nor one of a grid is better."""
    activations = activations.copy()
    activations[0, 0] = 1
    if args.scale_dtype is None and dtype == torch.float32:
        dtype = torch.bfloat16
    value = torch.from_numpy(matrix).to(dtype)
    importance = None
    found = {}
    for power in (norm, 2.0):
        observer = Observer.load_from_registry("optimal", base_name="weight", args=args, norm=power)
        if weighed:
            gather(observer, activations)
        found[power] = observer(value).get_qparams()
    if weighed:
        importance = (activations.astype(np.float64) ** 2).mean(axis=0)
        importance /= importance.mean()
    ours, squares = (objective(value, found[p], args, norm, importance) for p in (norm, 2.0))
    size = size_of(value, args, norm, importance)
    # errors of 2^-23 of a group's values count as none
    floor = size * 2.0 ** (-20 * norm)
    assert_not_worse(ours, squares, floor=floor, size=size, norm=norm)
    if not weighed:
        for patience in (0, 5):
            grid = qparams_of("memoryless_mse", value, args, norm=norm, patience=patience)
            theirs = objective(value, grid, args, norm)
            assert_not_worse(ours, theirs, floor=floor, size=size, norm=norm)


@pytest.mark.parametrize("name", ["int4_group", "int3_asym_group", "NVFP4", "int2_channel"])
def test_another_norm_is_another_scale(name: str) -> None:
    """Never worse would also hold for a search that ignores the norm."""
    args = FORMATS[name]
    value = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    squares, fourths = (
        objective(value, qparams_of("optimal", value, args, norm=p), args, 4.0) for p in (2.0, 4.0)
    )
    assert squares.sum() > fourths.sum() * 1.01


@every_format
def test_importance_is_worth_having(args) -> None:
    """By the weighed objective, a search that knows the weights beats one that does not."""
    generator = torch.Generator().manual_seed(1)
    activations = torch.randn(16, COLUMNS, generator=generator) * 10 ** torch.linspace(
        -2, 2, COLUMNS
    )
    value = torch.randn(ROWS, COLUMNS, generator=generator)
    importance = activations.square().mean(0)
    importance = (importance / importance.mean()).numpy()
    observer = Observer.load_from_registry("imatrix_mse", base_name="weight", args=args, patience=0)
    gather(observer, activations.numpy())
    weighed = objective(value, observer(value).get_qparams(), args, 3.0, importance)
    same = {"maxshrink": 0.95, "grid": 20, "norm": 3.0, "patience": 0}
    plain = qparams_of("memoryless_mse", value, args, **same)
    unweighed = objective(value, plain, args, 3.0, importance)
    assert_not_worse(weighed, unweighed)
    if args.num_bits <= 4 and args.scale_dtype is None:
        assert weighed.sum() < unweighed.sum() * 0.99


@pytest.mark.parametrize("name", ["int4_group", "int3_asym_group", "NVFP4", "int2_channel"])
def test_the_search_gains_something(name: str) -> None:
    """Never worse would also hold for a search that does nothing."""
    args = FORMATS[name]
    value = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    found = qparams_of("memoryless_mse", value, args, maxshrink=0.5, patience=0)
    plain = qparams_of("memoryless_minmax", value, args)
    gain = objective(value, plain, args, 2.4).sum() / objective(value, found, args, 2.4).sum()
    assert gain > 1.05
