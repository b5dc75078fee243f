"""Compiled attention against softmax(scale q k^T) v in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from steelyard.kernels.masked_attention import attention, has_attention

needs_attention = pytest.mark.skipif(not has_attention(), reason="needs avx512_bf16, without AMX")

TYPES = (torch.float32, torch.bfloat16)


def states(
    heads: tuple[int, int],
    tokens: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    batch: int = 1,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, laid out as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens[0], heads[0], widths[0]), (tokens[1], heads[1], widths[0])]
    shapes.append((tokens[1], heads[1], widths[1]))
    made = [torch.randn(batch, *shape, generator=generator) for shape in shapes]
    made[0] *= 2
    query, key, value = (x.to(dtype).transpose(1, 2) for x in made)
    return query, key, value


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output for inputs in bf16, and the same of the values' sizes; float64."""
    q, k, v = (x.bfloat16().double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2), (weights @ v.abs()).transpose(1, 2)


def assert_is_attention(
    found: torch.Tensor | None, query: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert found is not None and found.dtype == query.dtype
    output, sizes = expected
    # each weight is rounded to bf16, and the output too if that is its type
    allowed = 2**-8 * sizes + (2**-8 * output.abs() if query.dtype == torch.bfloat16 else 0) + 1e-6
    assert found.shape == output.shape
    assert bool(((found.double() - output).abs() <= allowed).all())


def causal(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


@needs_attention
@pytest.mark.parametrize("dtype", TYPES)
@given(
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (3, 3)]),
    tokens=st.tuples(st.integers(1, 70), st.integers(1, 100)),
    widths=st.tuples(st.integers(1, 40).map(lambda i: 2 * i), st.integers(1, 70)),
    batch=st.integers(1, 3),
    kind=st.sampled_from(["causal", "all", "mask", "masks"]),
    scale=st.sampled_from([None, 0.25, 1.0]),
    seed=st.integers(0, 1000),
)
def test_oracle(
    dtype: torch.dtype,
    heads: tuple[int, int],
    tokens: tuple[int, int],
    widths: tuple[int, int],
    batch: int,
    kind: str,
    scale: float | None,
    seed: int,
) -> None:
    given_states = states(heads, tokens, widths, dtype, batch, seed)
    queries, keys = tokens
    seen = causal(queries, keys) if kind == "causal" else torch.ones(queries, keys).bool()
    mask = None
    if kind.startswith("mask"):
        generator = torch.Generator().manual_seed(seed)
        count = batch if kind == "masks" else 1
        ends = torch.randint(0, keys, (2, count, 1, queries, 1), generator=generator)
        first, last = ends.min(0).values, ends.max(0).values
        mask = (torch.arange(keys) >= first) & (torch.arange(keys) <= last)
        seen = mask
    found = attention(*given_states, mask, kind == "causal", scale)
    assert_is_attention(found, given_states[0], exact(*given_states, seen, scale))


@needs_attention
def test_agrees_with_torch_on_a_sliding_window() -> None:
    query, key, value = states((4, 2), (300, 300), (64, 64), torch.bfloat16)
    mask = (causal(300, 300) & ~causal(300, 300).tril(-50))[None, None].expand(1, 1, -1, -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )
    found = attention(query, key, value, mask, False)
    assert found is not None
    assert_close(found.transpose(1, 2), expected, rtol=2**-6, atol=2**-8)


@needs_attention
@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    given_states = states((6, 2), (300, 300), (64, 48), dtype, batch=2)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(attention(*given_states, None, True))
    finally:
        torch.set_num_threads(before)
    one, *others = found
    assert one is not None
    assert all(other is not None and torch.equal(one, other) for other in others)
    alone = attention(*(x[1:] for x in given_states), None, True)
    assert alone is not None and torch.equal(alone, one[1:])


@needs_attention
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_shows(place: int, bad: float) -> None:
    given_states = states((2, 2), (40, 40), (16, 16), torch.float32)
    given_states[place][0, 1, 7, 3] = bad
    found = attention(*given_states, None, True)
    assert found is not None
    reached = found[0, 7 if place == 0 else slice(7, None), 1]
    if place == 2:
        assert not reached[..., 3].isfinite().any()
    elif math.isnan(bad) or place == 0:
        assert not reached.isfinite().any()
    assert found[0, :, 0].isfinite().all()


@needs_attention
def test_large_scores() -> None:
    query, key, value = states((2, 2), (64, 64), (32, 32), torch.float32)
    query *= 1000
    assert_is_attention(
        attention(query, key, value, None, True),
        query,
        exact(query, key, value, causal(64, 64)),
    )


def test_what_it_leaves_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = states((4, 2), (8, 8), (16, 16), torch.bfloat16)
    hole = causal(8, 8)[None, None].clone()
    hole[..., 5, 2] = False
    nothing = causal(8, 8)[None, None].clone()
    nothing[..., 0, 0] = False
    for mask in (hole, nothing, causal(8, 8), causal(8, 8)[None, None].bfloat16()):
        assert attention(query, key, value, mask, False) is None
    assert attention(query, key, value, causal(8, 7)[None, None], False) is None
    assert attention(query.half(), key.half(), value.half(), None, True) is None
    assert attention(query, key.float(), value, None, True) is None
    assert attention(query[..., :15], key[..., :15], value, None, True) is None
    assert attention(query[:, :3], key, value, None, True) is None
    assert attention(query[0], key[0], value[0], None, True) is None
    assert attention(query, key[:, :, :0], value[:, :, :0], None, False) is None
    assert attention(query, key, value, None, True, -1.0) is None
    monkeypatch.setenv("STEELYARD_BACKEND", "reference")
    assert attention(query, key, value, None, True) is None
    monkeypatch.setenv("STEELYARD_BACKEND", "auto")
    monkeypatch.setenv("STEELYARD_ISA", "baseline")
    assert attention(query, key, value, None, True) is None
    assert not has_attention()
