"""The shrink-grid search against a NumPy brute force over all candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy_oracle as oracle
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from steelyard.kernels import grid_search as search
from steelyard.kernels.grid_search import (
    candidate_errors,
    first_best,
    search_range,
    shrink_factors,
)
from steelyard.kernels.qparams import global_scale_of
from steelyard.kernels.range import range_of

TIE = 1e-5  # two candidates whose errors differ by less than this share are equally good


@dataclass(frozen=True)
class Case:
    """A type, and the type in which its scales are stored."""

    name: str
    args: QuantizationArgs
    scale_dtype: torch.dtype

    def __str__(self) -> str:
        return self.name


def _case(bits: int, kind: str, symmetric: bool, dtype: torch.dtype) -> Case:
    args = QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, strategy="channel")
    suffix = "" if symmetric else "_asym"
    return Case(f"{kind}{bits}{suffix}-{str(dtype).removeprefix('torch.')}", args, dtype)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    _case(2, "int", True, BF16),
    _case(2, "int", False, FP32),
    _case(3, "int", False, BF16),
    _case(4, "int", True, BF16),
    _case(4, "int", True, FP32),
    _case(4, "int", False, FP16),
    _case(4, "int", False, BF16),
    _case(8, "int", True, BF16),
    _case(8, "int", False, FP32),
    _case(8, "float", True, BF16),
    _case(8, "float", True, FP32),
    _case(8, "float", False, FP16),
    _case(4, "float", True, BF16),
    Case("NVFP4", preset_name_to_scheme("NVFP4", ["Linear"]).weights, torch.float8_e4m3fn),
    Case("MXFP4", preset_name_to_scheme("MXFP4", ["Linear"]).weights, torch.uint8),
    Case("MXFP8", preset_name_to_scheme("MXFP8", ["Linear"]).weights, torch.uint8),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
# without those whose scales fp16 cannot hold
every_wide_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.scale_dtype != FP16], ids=str
)

# (num_observations, *qparam_shape, group_size) of tensor, channel, group, token and attn_head
SHAPES = [(1, 1, 48), (7, 1, 9), (1, 5, 1, 24), (1, 3, 4, 16), (1, 2, 3, 1, 12), (6, 4, 1, 1, 8)]


def heavy_tailed(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers with outliers, so that shrinking pays, off centre, so that zero points matter."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    return (normal * normal.abs() + 0.3).to(dtype)


def global_scale_for(case: Case, observed: torch.Tensor) -> torch.Tensor | None:
    return global_scale_of(observed.float().abs().max()) if case.name == "NVFP4" else None


def brute_force(
    observed: torch.Tensor,
    case: Case,
    factors: list[float],
    norm: float,
    importance: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> np.ndarray:
    return oracle.brute_force(
        observed.double().numpy(),
        case.args,
        case.scale_dtype,
        factors,
        norm,
        1.0 if importance is None else importance.double().numpy(),
        None if global_scale is None else global_scale.item(),
    )


def chosen_index(
    found: tuple[torch.Tensor, torch.Tensor], observed: torch.Tensor, factors: list[float]
) -> np.ndarray:
    """Return which factor turned the observed range into the found one, the same at both ends."""
    low, high = range_of(observed)
    candidates = torch.tensor(factors, dtype=low.dtype)
    places = []
    for actual, full in zip(found, (low, high), strict=True):
        assert actual.shape == full.shape
        matches = actual == full * candidates.reshape(-1, *[1] * full.ndim)
        assert bool(matches.any(0).all()), "the range found is no candidate"
        places.append(matches)
    both = places[0] & places[1]
    assert bool(both.any(0).all()), "the two ends were shrunk differently"
    return both.int().argmax(0).numpy()


def assert_best(index: np.ndarray, errors: np.ndarray) -> None:
    """Check that the chosen candidates are the brute-force best, up to ties."""
    chosen = np.take_along_axis(errors, index[None], axis=0)[0]
    best = errors.min(axis=0)
    worse = chosen > best * (1 + TIE)
    assert not worse.any(), (
        f"chose {index[worse]} with error {chosen[worse]}, but {errors.argmin(axis=0)[worse]} "
        f"has {best[worse]}"
    )


# -- the search -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_case
def test_search_finds_the_best_candidate(case: Case, shape: tuple[int, ...]) -> None:
    factors = shrink_factors(0.8, 40)
    moved = 0
    for seed, dtype in enumerate((BF16, FP32, FP16)):
        observed = heavy_tailed(shape, dtype, seed)
        global_scale = global_scale_for(case, observed)
        found = search_range(
            observed, case.args, case.scale_dtype, factors, 2.4, global_scale=global_scale
        )
        errors = brute_force(observed, case, factors, 2.4, global_scale=global_scale)
        index = chosen_index(found, observed, factors)
        assert_best(index, errors)
        moved += int((index > 0).sum())
    if case.args.num_bits <= 4 and case.scale_dtype != torch.uint8:  # a power of two rarely moves
        assert moved > 0, "no group was shrunk: the case tests nothing"


@pytest.mark.parametrize("norm", [0.5, 1.0, 2.0, 2.4, 3.0, 4.0])
@every_case
def test_search_with_norms_and_importance(case: Case, norm: float) -> None:
    factors = shrink_factors(0.95, 20)
    observed = heavy_tailed((1, 3, 2, 32), BF16, seed=3)
    global_scale = global_scale_for(case, observed)
    generator = torch.Generator().manual_seed(4)
    importance = torch.rand(1, 1, 2, 32, generator=generator) ** 4
    importance[..., 1, :5] = 0
    found = search_range(
        observed,
        case.args,
        case.scale_dtype,
        factors,
        norm,
        importance=importance,
        global_scale=global_scale,
    )
    errors = brute_force(observed, case, factors, norm, importance, global_scale)
    assert_best(chosen_index(found, observed, factors), errors)


def test_importance_changes_the_choice() -> None:
    """Without it the outlier rules; where the outlier does not count, the rest does."""
    observed = torch.cat([torch.linspace(-1, 1, 31), torch.tensor([4.0])]).reshape(1, 1, 1, 32)
    case, factors = CASES[4], shrink_factors(0.95, 20)
    importance = torch.ones(1, 1, 1, 32)
    importance[..., -1] = 0
    plain = search_range(observed, case.args, FP32, factors, 2.0)
    weighed = search_range(observed, case.args, FP32, factors, 2.0, importance=importance)
    assert weighed[1].item() < plain[1].item() / 2


@every_case
def test_errors_are_those_of_the_brute_force(case: Case) -> None:
    factors = shrink_factors(0.5, 10)
    for seed, norm in enumerate((1.0, 2.0, 2.4)):
        observed = heavy_tailed((3, 2, 4, 16), BF16, seed)
        global_scale = global_scale_for(case, observed)
        importance = torch.rand(16, generator=torch.Generator().manual_seed(seed)).expand(4, 16)
        low, high = range_of(observed)
        actual = candidate_errors(
            observed,
            low,
            high,
            case.args,
            case.scale_dtype,
            factors,
            norm,
            importance,
            global_scale,
        )
        expected = brute_force(observed, case, factors, norm, importance, global_scale)
        assert tuple(actual.shape) == (len(factors), 2, 4)
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual.numpy(), expected, rtol=2e-4, atol=1e-9)


def test_float64_is_searched_in_float64() -> None:
    case, factors = CASES[3], shrink_factors(0.8, 40)
    observed = heavy_tailed((1, 4, 1, 32), torch.float64, seed=0) + 1e-13
    low, high = range_of(observed)
    errors = candidate_errors(observed, low, high, case.args, FP32, factors, 2.0)
    assert errors.dtype == torch.float64
    found = search_range(observed, case.args, FP32, factors, 2.0)
    assert found[0].dtype == torch.float64
    assert_best(chosen_index(found, observed, factors), errors.numpy())


@pytest.mark.parametrize("exponent", [-100, -60, 60, 100])
@every_wide_case
def test_magnitude_does_not_matter(case: Case, exponent: int) -> None:
    """Powers of two scale exactly, so the same fraction must win."""
    factors = shrink_factors(0.8, 40)
    observed = heavy_tailed((1, 4, 1, 32), FP32, seed=2)
    scaled = torch.ldexp(observed, torch.tensor(exponent))
    indices = []
    for value in (observed, scaled):
        found = search_range(
            value,
            case.args,
            case.scale_dtype,
            factors,
            2.4,
            global_scale=global_scale_for(case, value),
        )
        indices.append(chosen_index(found, value, factors))
    np.testing.assert_array_equal(indices[0], indices[1])


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@every_wide_case
def test_huge_and_tiny_magnitudes(case: Case, magnitude: float) -> None:
    factors = shrink_factors(0.8, 40)
    observed = heavy_tailed((1, 8, 1, 64), FP32, seed=3) * magnitude
    global_scale = global_scale_for(case, observed)
    found = search_range(
        observed, case.args, case.scale_dtype, factors, 3.0, global_scale=global_scale
    )
    errors = brute_force(observed, case, factors, 3.0, global_scale=global_scale)
    assert np.isfinite(errors).all()
    index = chosen_index(found, observed, factors)
    assert_best(index, errors)
    if case.args.num_bits <= 4 and case.scale_dtype != torch.uint8:
        assert index.max() > 0, "nothing was shrunk: the errors vanished or overflowed"


@every_case
def test_groups_are_judged_apart(case: Case) -> None:
    """One group's range does not depend on its neighbours, however large they are."""
    factors = shrink_factors(0.8, 40)
    observed = heavy_tailed((1, 3, 1, 32), FP32, seed=5)
    global_scale = global_scale_for(case, observed)
    together = search_range(
        observed, case.args, case.scale_dtype, factors, 2.4, global_scale=global_scale
    )
    for i in range(3):
        alone = search_range(
            observed[:, i : i + 1],
            case.args,
            case.scale_dtype,
            factors,
            2.4,
            global_scale=global_scale,
        )
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[i : i + 1], theirs, rtol=0, atol=0)


@every_case
def test_zeros_and_values_without_error_stay_unshrunk(case: Case) -> None:
    observed = torch.zeros(1, 2, 1, 32)
    found = search_range(
        observed,
        case.args,
        case.scale_dtype,
        shrink_factors(0.5, 10),
        2.4,
        global_scale=global_scale_for(case, observed),
    )
    for values in found:
        torch.testing.assert_close(values, torch.zeros(2, 1), rtol=0, atol=0)


def test_given_range_is_used() -> None:
    observed, factors = heavy_tailed((1, 1, 16), FP32, seed=0), shrink_factors(0.2, 10)
    given = torch.tensor([-8.0]), torch.tensor([4.0])
    low, high = search_range(observed, CASES[4].args, FP32, factors, 2.0, observed_range=given)
    assert low.item() / high.item() == -2
    assert any(high.item() == np.float32(4) * np.float32(p) for p in factors)


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 16, 33, 100])
@pytest.mark.parametrize("shape", [(5, 6, 9), (1, 3, 4, 16), (11, 1, 3), (1, 1, 50)], ids=str)
def test_chunks_do_not_change_the_errors(
    shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, factors = CASES[6], shrink_factors(0.5, 4)
    observed = heavy_tailed(shape, BF16, seed=1)
    importance = torch.rand(shape[-1], generator=torch.Generator().manual_seed(2))
    low, high = range_of(observed)

    def errors() -> torch.Tensor:
        return candidate_errors(
            observed, low, high, case.args, case.scale_dtype, factors, 2.4, importance
        )

    assert observed.numel() <= search._CHUNK
    whole = errors()
    monkeypatch.setattr(search, "_CHUNK", chunk)
    torch.testing.assert_close(errors(), whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("shape", [(5, 6, 9), (1, 3, 4), (3, 1, 1)], ids=str)
def test_chunks_cover_everything_once(
    shape: tuple[int, int, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_CHUNK", chunk)
    seen = np.zeros(shape, dtype=int)
    for part in search._chunks(shape):
        assert 1 <= seen[part].size <= chunk
        seen[part] += 1
    np.testing.assert_array_equal(seen, np.ones(shape, dtype=int))


# -- the choice -----------------------------------------------------------------------------


def choose(table: list[list[float]], patience: int = 0) -> list[int]:
    """Choose from a table of one row per group: (group, candidate)."""
    return first_best(torch.tensor(table).T, patience).tolist()


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([3, 2, 1, 2], 2),
        ([1, 1, 1], 0),
        ([2, 1, 1], 1),
        ([0, 0], 0),
        ([1], 0),
        ([NAN, 5, 6], 1),
        ([INF, 5, 4], 2),
        ([5, NAN, 4], 2),
        ([5, NAN, INF], 0),
        ([NAN, NAN], 0),
        ([NAN, INF, NAN], 0),
    ],
)
def test_first_best(row: list[float], expected: int) -> None:
    assert choose([row]) == [expected]


def test_first_best_keeps_the_parameters_shape() -> None:
    errors = torch.rand(7, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    best = first_best(errors)
    assert best.dtype == torch.long
    np.testing.assert_array_equal(best.numpy(), errors.numpy().argmin(axis=0))


#        step:     1  2  3  4  5  6
ONE_GROUP = [[9.0, 8, 8, 8, 8, 7, 1]]


@pytest.mark.parametrize(
    ("patience", "expected"),
    [(0, 6), (1, 1), (2, 1), (3, 1), (4, 6), (5, 6), (100, 6)],
)
def test_patience_counts_idle_steps(patience: int, expected: int) -> None:
    """Steps 2, 3 and 4 bring nothing, so patience 3 stops before step 5, and 4 does not."""
    assert choose(ONE_GROUP, patience) == [expected]


def test_patience_at_the_first_step() -> None:
    assert choose([[5.0, 6, 1]], patience=1) == [0]
    assert choose([[5.0, 6, 1]], patience=2) == [2]


def test_equal_error_is_no_improvement() -> None:
    assert choose([[5.0, 5, 5, 1]], patience=2) == [0]
    assert choose([[5.0, 5, 5, 1]], patience=3) == [3]


def test_one_improving_group_keeps_the_whole_tensor_going() -> None:
    idle = [9.0, 9, 9, 9, 9, 9, 1]
    busy = [9.0, 9, 8, 8, 7, 7, 7]  # never two idle steps in a row
    assert choose([idle], patience=2) == [0]
    assert choose([idle, busy], patience=2) == [6, 4]


def test_patience_starts_anew_after_an_improvement() -> None:
    # two idle steps, an improvement, two idle steps, an improvement, three idle steps
    row = [9.0, 9, 9, 8, 8, 8, 7, 7, 7, 7, 1]
    assert choose([row], patience=3) == [6]
    assert choose([row], patience=2) == [0]


def test_improvement_is_against_the_best_so_far() -> None:
    """Falling errors that stay above the best are idle steps."""
    assert choose([[3.0, 9, 8, 7, 2]], patience=3) == [0]
    assert choose([[3.0, 9, 8, 7, 2]], patience=4) == [4]


def test_patience_reaches_the_search() -> None:
    """A single small group, whose error rises and falls along the grid."""
    case, factors, changed = CASES[4], shrink_factors(0.9, 100), 0
    for seed in range(6):
        observed = heavy_tailed((1, 1, 24), FP32, seed)
        low, high = range_of(observed)
        errors = candidate_errors(observed, low, high, case.args, FP32, factors, 2.4)
        answers = {}
        for patience in (0, 1, 5):
            found = search_range(observed, case.args, FP32, factors, 2.4, patience)
            answers[patience] = chosen_index(found, observed, factors)
            np.testing.assert_array_equal(answers[patience], first_best(errors, patience).numpy())
        assert_best(answers[0], errors.double().numpy())
        changed += int((answers[1] != answers[0]).sum())
    assert changed > 0, "patience made no difference: the cases are too easy"


# -- the grid -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maxshrink", "grid", "steps"),
    [(0.2, 100, 20), (0.95, 20, 19), (0.29, 100, 29), (0.57, 100, 57), (0.2, 10, 2), (0.5, 3, 1)],
)
def test_shrink_factors(maxshrink: float, grid: float, steps: int) -> None:
    factors = shrink_factors(maxshrink, grid)
    np.testing.assert_allclose(factors, [1 - i / grid for i in range(steps + 1)], rtol=1e-12)
    assert factors[0] == 1.0
    assert factors[-1] >= 1 - maxshrink - 1e-9


def test_every_percent_of_the_grid_is_counted() -> None:
    """No product of maxshrink and grid loses a step to rounding."""
    for percent in range(1, 100):
        assert len(shrink_factors(percent / 100, 100)) == percent + 1


def test_range_is_never_shrunk_to_nothing() -> None:
    for grid in (2, 3, 7, 10, 20, 100, 128.0):
        factors = shrink_factors(1.0, grid)
        assert len(factors) == int(grid)
        assert min(factors) > 0.5 / grid


@pytest.mark.parametrize(("maxshrink", "grid"), [(0.0, 100), (0.2, 1), (0.2, 4.9), (0.009, 100)])
def test_no_candidate_is_an_error(maxshrink: float, grid: float) -> None:
    with pytest.raises(ValueError, match=rf"maxshrink={maxshrink} with grid={grid} .*no candidate"):
        shrink_factors(maxshrink, grid)


def test_range_that_shrinks_to_nothing_is_no_candidate() -> None:
    with pytest.raises(ValueError, match="leaves no candidate"):
        shrink_factors(1.0, 1)
    assert shrink_factors(1.0, 2) == [1.0, 0.5]
