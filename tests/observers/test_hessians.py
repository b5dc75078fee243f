"""Hessians of experts: weighted by the router, completed by those of the layer; against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Linear
from torch.testing import assert_close

from steelyard.distributed import ThreadPool
from steelyard.observers.hessians import Hessians

HIDDEN, INNER = 24, 8
Rows = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]


def modules(experts: int) -> dict[str, Linear]:
    found = {}
    for number in range(experts):
        for leaf in ("gate_proj", "up_proj"):
            found[f"mlp.experts.{number}.{leaf}"] = Linear(HIDDEN, INNER, bias=False)
        found[f"mlp.experts.{number}.down_proj"] = Linear(INNER, HIDDEN, bias=False)
    found["o_proj"] = Linear(HIDDEN, HIDDEN, bias=False)
    return found


def gathered(rows: dict[str, Rows], experts: int) -> Hessians:
    hessians = Hessians(modules(experts), pool=ThreadPool())
    for number in range(experts):
        for x, weights in rows["entry"][number]:
            names = [f"mlp.experts.{number}.{leaf}" for leaf in ("gate_proj", "up_proj")]
            hessians.see(names, x, weights=weights)
            hessians.flush()
        for x, weights in rows["inner"][number]:
            hessians.see([f"mlp.experts.{number}.down_proj"], x, weights=weights)
            hessians.flush()
    hessians.close()
    hessians.join({})
    hessians.shrink({})
    return hessians


def expected(rows: Rows, columns: int, inner: bool) -> dict[int, torch.Tensor]:
    """Return S + n M of each expert, in fp64 from the definition."""
    sums, tokens = {}, 0
    for number, batches in rows.items():
        sums[number] = torch.zeros(columns, columns, dtype=torch.float64)
        for x, weights in batches:
            for token, weight in zip(x.double(), weights.double(), strict=True):
                sums[number] += weight**2 * torch.outer(token, token)
                tokens += 1
    mean = torch.stack(list(sums.values())).sum(0) / tokens
    if inner:
        mean = torch.eye(columns, dtype=torch.float64) * mean.trace() / columns
    return {number: each + columns * mean for number, each in sums.items()}


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=2, max_size=5),
    seed=st.integers(0, 99),
)
def test_hessians_of_experts_are_weighted_and_shrunk(counts: list[list[int]], seed: int) -> None:
    counts[-1][-1] += 1  # at least one token in all
    generator = torch.Generator().manual_seed(seed)
    rows: dict[str, Rows] = {"entry": {}, "inner": {}}
    for number, batches in enumerate(counts):
        for place, columns in (("entry", HIDDEN), ("inner", INNER)):
            rows[place][number] = [
                (
                    torch.randn(tokens, columns, generator=generator) * (1 + number),
                    torch.rand(tokens, generator=generator),
                )
                for tokens in batches
                if tokens
            ]
    hessians = gathered(rows, len(counts))
    entry = expected(rows["entry"], HIDDEN, inner=False)
    inner = expected(rows["inner"], INNER, inner=True)
    for number, batches in enumerate(counts):
        for leaf, wanted in (("gate_proj", entry), ("up_proj", entry), ("down_proj", inner)):
            name, columns = f"mlp.experts.{number}.{leaf}", len(wanted[number])
            assert hessians.tokens(name) == sum(batches)
            found = hessians.hessian(name).double()
            assert_close(found, wanted[number], rtol=1e-4, atol=1e-4)
            importance = hessians.importance(name)
            assert importance is not None
            assert importance[1] == sum(batches) + columns
            assert_close(importance[0].double(), wanted[number].diagonal(), rtol=1e-4, atol=1e-4)


def test_other_modules_are_not_shrunk() -> None:
    hessians = Hessians(modules(2), pool=ThreadPool())
    x = torch.randn(5, HIDDEN)
    hessians.see(["o_proj"], x)
    hessians.flush()
    hessians.join({})
    hessians.shrink({})
    assert_close(hessians.hessian("o_proj"), x.t() @ x, rtol=1e-5, atol=1e-5)
    assert float(hessians.hessian("mlp.experts.0.gate_proj").abs().sum()) == 0
    assert hessians.importance("mlp.experts.0.gate_proj") is None


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(90, 60), (70, 29)])  # as many as half of the columns, or fewer
def test_drift_of_even_and_odd_batches(
    dtype: torch.dtype, rows: tuple[int, int], workers: int
) -> None:
    columns = 200  # two slabs
    generator = torch.Generator().manual_seed(0)
    linears = {name: Linear(columns, n, bias=False) for name, n in zip("ab", rows, strict=True)}
    batches = [torch.randn(2, 3, columns, generator=generator).to(dtype) for _ in range(5)]
    originals = [x + 0.1 * torch.randn(x.shape, generator=generator).to(dtype) for x in batches]
    with ThreadPool(workers) as pool:
        hessians = Hessians(linears, pool=pool)
        for number, (x, original) in enumerate(zip(batches, originals, strict=True)):
            hessians.see(["a", "b"], x, 3 * number, original=original, batch=number)
            hessians.flush()
        hessians.close()
        moments, drifts = hessians.halves("a")
    multiplied = 2 * sum(rows) < columns
    weights = torch.cat([linear.weight.data.to(dtype).double() for linear in linears.values()])
    for half in (0, 1):
        x = torch.cat(batches[half::2]).double().flatten(0, 1)
        off = torch.cat(originals[half::2]).double().flatten(0, 1) - x
        assert_close(moments[half].double(), x.t() @ x, rtol=1e-5, atol=1e-4)
        # of bf16 inputs, the differences and the products with the weights are rounded to bf16
        rounding = 1e-6 + ((1 + multiplied) * 2.0**-8 if dtype == torch.bfloat16 else 0)
        wanted, bound = off.t() @ x, off.abs().t() @ x.abs()
        if multiplied:
            wanted, bound = weights @ wanted, weights.abs() @ bound
        assert drifts[half].shape == wanted.shape
        error = (drifts[half].double() - wanted).abs()
        assert bool((error <= rounding * bound).all())


def test_a_module_that_joins_later_has_a_drift_of_its_own() -> None:
    linears = {"a": Linear(32, 8, bias=False), "b": Linear(32, 4, bias=False)}
    hessians = Hessians(linears, pool=ThreadPool())
    for batch in range(2):
        x, original = torch.randn(40, 32), torch.randn(40, 32)
        for name in linears:  # the same tensor, in two calls
            hessians.see([name], x, batch, original=original, batch=batch)
    hessians.flush()
    assert [len(hessians.halves(name)[1][0]) for name in linears] == [8, 4]
    assert torch.equal(hessians.hessian("a"), hessians.hessian("b"))


def test_without_originals_there_are_no_halves() -> None:
    hessians = Hessians({"a": Linear(8, 4)}, pool=ThreadPool())
    hessians.see(["a"], torch.randn(3, 8))
    hessians.flush()
    assert hessians.halves("a") is None
