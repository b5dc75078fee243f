"""GPTQ against a direct implementation in float64, and what it does with unusual Hessians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_problems import (
    DTYPES,
    FORMATS,
    decoded,
    hessian_of,
    loss_of,
    nearest,
    packed,
    qparams_of,
    solved,
    weight_of,
)
from torch.testing import assert_close

from steelyard.errors import NonFiniteError, StrategyError
from steelyard.kernels.gptq_rounding import activation_order, solve

INT4 = FORMATS["int4_group"]
every_format = pytest.mark.parametrize("args", FORMATS.values(), ids=FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
both_backends = pytest.mark.parametrize("backend", ["reference", "compiled"])


def direct(
    w: np.ndarray, hessian: np.ndarray, step: np.ndarray, order: list[int], frac: float
) -> np.ndarray:
    """Round int4 weights one column at a time, inverting all of what is left of H each time."""
    h = hessian + frac * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    w, q, left = w.copy(), np.empty_like(w), list(order)
    while left:
        inverse = np.linalg.inv(h[np.ix_(left, left)])
        j = left[0]
        q[:, j] = np.clip(np.rint(w[:, j] / step[:, j]), -8, 7) * step[:, j]
        w[:, left] -= np.outer((w[:, j] - q[:, j]) / inverse[0, 0], inverse[0])
        left = left[1:]
    return q


@both_backends
@pytest.mark.parametrize("frac", [0.01, 0.3])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_oracle(backend: str, frac: float, ordered: bool, seed: int) -> None:
    weight, hessian = weight_of(24, 48, seed=seed), hessian_of(48, seed=seed + 10)
    order = activation_order(hessian) if ordered else torch.arange(48)
    scale, _, _ = qparams_of(weight, INT4)
    step = scale.double().repeat_interleave(16, 1).numpy()
    expected = direct(weight.double().numpy(), hessian.double().numpy(), step, order.tolist(), frac)
    result = solved(
        weight, hessian, INT4, order=order, dampening_frac=frac, block_size=16, backend=backend
    )
    plain = nearest(weight, INT4)
    ours, theirs = (loss_of(weight, q, hessian) for q in (torch.from_numpy(expected), plain))
    loses = ours > theirs * (1 + 1e-5)
    expected[loses] = plain[loses]
    assert result.nearest_rows == int(loses.sum()) < 3
    # a value in the middle of two codes may go either way in fp32: none does so here
    assert_close(result.weight.double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-9)


@both_backends
@pytest.mark.parametrize("block_size", [1, 7, 48, 500])
def test_blocks_change_nothing(backend: str, block_size: int) -> None:
    weight, hessian = weight_of(33, 96), hessian_of(96)
    usual = solved(weight, hessian, INT4, backend=backend)
    other = solved(weight, hessian, INT4, backend=backend, block_size=block_size)
    assert_close(usual.weight, other.weight, rtol=0, atol=0)
    assert other.loss == pytest.approx(usual.loss, rel=1e-5)


@both_backends
@every_dtype
@every_format
def test_every_type_packs_to_what_was_chosen(
    backend: str, dtype: torch.dtype, args: QuantizationArgs
) -> None:
    weight, hessian = weight_of(37, 96, dtype), hessian_of(96)
    result = solved(weight, hessian, args, order=activation_order(hessian), backend=backend)
    assert result.weight.dtype == dtype and result.weight.is_contiguous()
    codes = packed(result.weight, weight, args)
    assert_close(decoded(codes, weight, args), result.weight, rtol=0, atol=0)
    assert result.nearest_rows <= 1
    plain = nearest(weight, args)
    assert_close(
        result.loss, float(loss_of(weight, result.weight, hessian).sum()), rtol=1e-4, atol=0
    )
    assert_close(
        result.nearest_loss, float(loss_of(weight, plain, hessian).sum()), rtol=1e-4, atol=0
    )
    assert result.loss < 0.8 * result.nearest_loss
    assert result.fallback is None and result.dampening_frac == 0.01


def test_more_rows_than_are_sampled() -> None:
    weight, hessian = weight_of(1100, 64), hessian_of(64)
    result = solved(weight, hessian, INT4)
    plain = loss_of(weight, nearest(weight, INT4), hessian)
    assert result.loss == pytest.approx(float(loss_of(weight, result.weight, hessian).sum()), 1e-4)
    assert result.nearest_loss == pytest.approx(float(plain.sum()), rel=0.1)


def test_rows_that_lose_are_rounded_to_nearest() -> None:
    """Next to a diagonal H there is nothing to gain; what is lost through dampening is undone."""
    weight, hessian = weight_of(200, 32), hessian_of(32, tokens=16, rank=1)
    result = solved(weight, hessian, INT4, dampening_frac=20.0)
    plain = nearest(weight, INT4)
    ours, theirs = (loss_of(weight, q, hessian) for q in (result.weight, plain))
    assert bool((ours <= theirs * (1 + 1e-9)).all())
    same = (result.weight == plain).all(1)
    assert 0 < result.nearest_rows <= int(same.sum()) < len(weight)


def test_groups_that_are_not_side_by_side() -> None:
    weight, hessian = weight_of(16, 64, torch.bfloat16), hessian_of(64)
    g_idx = (torch.randperm(64, generator=torch.Generator().manual_seed(3)) // 16).int()
    together = torch.argsort(g_idx, stable=True)
    apart = torch.argsort(together)
    scale, zero_point, _ = qparams_of(weight[:, together], INT4)
    got = solve(weight, hessian, scale, zero_point, INT4, g_idx=g_idx)
    # by hand: the columns moved, and rounded in the order in which they were
    moved = solve(
        weight[:, together],
        hessian[together][:, together],
        scale,
        zero_point,
        INT4,
        order=apart,
    )
    assert_close(got.weight[:, together], moved.weight, rtol=0, atol=0)
    steps = got.weight.float() / scale.float()[:, g_idx.long()]
    assert_close(steps, steps.round(), rtol=0, atol=0.04)
    ordered = solve(
        weight, hessian, scale, zero_point, INT4, g_idx=g_idx, order=activation_order(hessian)
    )
    assert ordered.loss < ordered.nearest_loss


@both_backends
@every_dtype
def test_dead_columns_are_rounded_to_nearest(backend: str, dtype: torch.dtype) -> None:
    weight, hessian = weight_of(20, 48, dtype), hessian_of(48)
    dead = torch.tensor([0, 5, 17, 47])
    hessian[dead] = 0
    hessian[:, dead] = 0
    for order in (None, activation_order(hessian)):
        result = solved(weight, hessian, INT4, order=order, backend=backend)
        assert result.dead_columns == 4
        plain = nearest(weight, INT4, exact=True)
        assert_close(result.weight[:, dead], plain[:, dead], rtol=0, atol=0)
        assert result.loss < result.nearest_loss
    undamped = solved(weight, hessian, INT4, dampening_frac=0.0, backend=backend)
    assert undamped.dampening_frac == 0.0 and undamped.fallback is None


@both_backends
def test_no_tokens(backend: str) -> None:
    weight = weight_of(20, 48)
    result = solved(weight, torch.zeros(48, 48), INT4, backend=backend)
    assert_close(result.weight, nearest(weight, INT4), rtol=0, atol=0)
    assert (result.loss, result.nearest_loss, result.dead_columns) == (0.0, 0.0, 48)
    assert result.nearest_rows == 20
    assert result.fallback == "no input has reached the layer"


@both_backends
def test_dampening_is_raised_until_there_is_a_factor(backend: str) -> None:
    weight, hessian = weight_of(20, 48), hessian_of(48)
    hessian -= 0.05 * float(hessian.diagonal().mean()) * torch.eye(48)
    needed = -float(torch.linalg.eigvalsh(hessian.double())[0] / hessian.diagonal().double().mean())
    assert needed > 0.01
    result = solved(weight, hessian, INT4, backend=backend, dampening_frac=0.001)
    assert needed < result.dampening_frac < 10.1 * needed
    assert result.fallback is None


@both_backends
def test_single_token(backend: str) -> None:
    """A Hessian of rank one, without dampening."""
    weight, hessian = weight_of(20, 48), hessian_of(48, tokens=1, rank=1)
    result = solved(weight, hessian, INT4, dampening_frac=0.0, backend=backend)
    assert result.fallback is None
    assert result.loss < 0.2 * result.nearest_loss


@both_backends
def test_no_factor_at_all(backend: str) -> None:
    weight, hessian = weight_of(20, 48), hessian_of(48)
    hessian[3, 4] = hessian[4, 3] = 1e9
    result = solved(weight, hessian, INT4, backend=backend)
    assert_close(result.weight, nearest(weight, INT4), rtol=0, atol=0)
    assert result.fallback == "the Hessian has no Cholesky factor, even with dampening_frac=100"
    assert result.loss == result.nearest_loss and result.nearest_rows == 20


@both_backends
@pytest.mark.parametrize("factor", [1e-36, 1e-20, 1e20, 1e33])
def test_the_size_of_inputs_does_not_matter(backend: str, factor: float) -> None:
    weight, hessian = weight_of(20, 48), hessian_of(48)
    usual = solved(weight, hessian, INT4, backend=backend)
    other = solved(weight, hessian * factor, INT4, backend=backend)
    assert float((usual.weight != other.weight).float().mean()) < 0.01
    assert other.loss == pytest.approx(usual.loss * factor, rel=1e-2)


@both_backends
def test_values_that_fp16_cannot_hold(backend: str) -> None:
    """The lowest code of a symmetric type lies beyond the largest weight, here beyond fp16."""
    weight = weight_of(20, 48, torch.float16)
    weight[:10] *= 3e5
    weight[0, 0] = -65504
    weight[10:] *= 2e-5  # and here what is smaller than its normal numbers
    args = FORMATS["NVFP4A16"] if backend == "reference" else INT4
    result = solved(weight, hessian_of(48), args, backend=backend)
    assert bool(result.weight.isfinite().all())
    assert result.loss <= result.nearest_loss
    codes = packed(result.weight, weight, args)
    again = decoded(codes, weight, args)
    # what is not its own decoded value is the weight as it was, and packs to the nearest code
    kept = again != result.weight
    assert torch.equal(result.weight[kept], weight[kept])


@pytest.mark.parametrize("name", ["weight", "Hessian"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(name: str, value: float) -> None:
    weight, hessian = weight_of(20, 48), hessian_of(48)
    (weight if name == "weight" else hessian)[3, 7] = value
    scale = torch.ones(20, 3)
    with pytest.raises(NonFiniteError, match=rf"the {name} holds .* at row 3, column 7"):
        solve(weight, hessian, scale, None, INT4)


def test_refusals() -> None:
    weight, hessian, scale = weight_of(20, 48), hessian_of(48), torch.ones(20, 3)
    with pytest.raises(StrategyError, match=r"needs a Hessian \(in, in\)"):
        solve(weight, hessian[:40, :40], scale, None, INT4)
    with pytest.raises(StrategyError, match="needs 20 by 3 scales"):
        solve(weight, hessian, scale[:, :2], None, INT4)
    with pytest.raises(StrategyError, match=r"shape \(20, 40\) does not divide into groups of 16"):
        solve(weight[:, :40], hessian[:40, :40], scale, None, INT4)
    with pytest.raises(ValueError, match="not symmetric"):
        solve(weight, hessian.triu(), scale, None, INT4)
    with pytest.raises(ValueError, match="block_size must be positive"):
        solve(weight, hessian, scale, None, INT4, block_size=0)
    with pytest.raises(ValueError, match="dampening_frac finite"):
        solve(weight, hessian, scale, None, INT4, dampening_frac=-0.1)
    with pytest.raises(ValueError, match="order must hold every column once"):
        solve(weight, hessian, scale, None, INT4, order=torch.zeros(48, dtype=torch.int64))
    with pytest.raises(ValueError, match="g_idx must hold one entry"):
        solve(weight, hessian, scale, None, INT4, g_idx=torch.zeros(47, dtype=torch.int64))
    with pytest.raises(StrategyError, match="each group 16 columns, got \\[48\\]"):
        solve(weight, hessian, scale, None, INT4, g_idx=torch.zeros(48, dtype=torch.int32))


def test_arguments_are_left_alone() -> None:
    weight, hessian = torch.nn.Parameter(weight_of(20, 48)), hessian_of(48)
    before = weight.clone(), hessian.clone()
    result = solved(weight, hessian, INT4, order=activation_order(hessian))
    assert not result.weight.requires_grad
    assert torch.equal(weight, before[0]) and torch.equal(hessian, before[1])
