"""`token_mse` against NumPy on all values, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import StatisticsError, StrategyError
from steelyard.kernels.bin_counts import BINS
from steelyard.kernels.token_bins import KEYS, add_tokens, joined_tables
from steelyard.observers import Observer


def tokens_of(huge: float = 300.0, skew: float = 0.0) -> list[torch.Tensor]:
    """Tokens of different sizes, (batch, seq, hidden) each; the first of a sample is huge."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-3, 2, (3, 1, 64, 1), generator=generator).float())
    found = torch.randn(3, 1, 64, 96, generator=generator) * sizes
    found[:, :, 0, 5] = huge
    return [(x + skew * x.abs()).bfloat16() for x in found]


def observed(values: list[torch.Tensor], **options) -> Observer:
    kind = {k: options.pop(k) for k in ("type", "symmetric") if k in options}
    args = QuantizationArgs(num_bits=8, strategy="tensor", **kind)
    observer = Observer.load_from_registry("token_mse", base_name="input", args=args, **options)
    for value in values:
        observer(value)
    return observer


def rounded(codes: np.ndarray, kind: str) -> np.ndarray:
    if kind == "int":
        return np.round(np.clip(codes, -128, 127))
    codes = np.clip(codes, -448, 448)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(codes), 1e-30))), -6)
    return np.round(codes / np.exp2(exponent - 3)) * np.exp2(exponent - 3)


def stored(scale: float) -> float:
    return float(torch.tensor(scale, dtype=torch.float32).bfloat16())


def weights_of(x: np.ndarray, relative: float) -> np.ndarray:
    """One over a power of each token's peak, which is known to a factor of two."""
    sizes = np.floor(np.log2(np.abs(x).max(1)))
    return np.exp2(-2 * relative * np.maximum(sizes, np.sort(sizes)[(len(sizes) - 1) // 2]))


@pytest.mark.parametrize("relative", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_no_range_costs_less(kind: str, relative: float) -> None:
    values = tokens_of()
    observer = observed(values, type=kind, relative=relative)
    x = np.concatenate([v.double().numpy().reshape(-1, 96) for v in values])
    weights, levels = weights_of(x, relative), 127.5 if kind == "int" else 448.0

    def cost(largest: float) -> float:
        scale = stored(largest / levels)
        off = rounded(x / scale, kind) * scale - x
        return float((np.square(off).sum(1) * weights).sum())

    low, high = (float(v) for v in observer.chosen_range(None))
    most = 2.0 if kind == "float" else 1.0
    grid = np.abs(x).max() * np.exp2(np.arange(-200, 17 * (kind == "float") + 1) / 16)
    best = min(cost(largest) for largest in grid if largest <= most * np.abs(x).max())
    assert low == -high
    # values are taken as spread over their bins, and every second range of the grid is judged
    assert cost(high) <= 1.05 * best
    if kind == "int":
        assert (high < 0.2 * np.abs(x).max()) == (relative > 0)


def test_a_zero_point_leaves_no_better_end() -> None:
    values = tokens_of(huge=300.0, skew=0.6)
    observer = observed(values, symmetric=False, relative=0.5)
    x = np.concatenate([v.double().numpy().reshape(-1, 96) for v in values])
    weights = weights_of(x, 0.5)

    def cost(low: float, high: float) -> float:
        scale = stored((high - low) / 255)
        zero_point = np.round(np.clip(-128 - low / scale, -128, 127))
        off = (rounded(x / scale + zero_point, "int") - zero_point) * scale - x
        return float((np.square(off).sum(1) * weights).sum())

    low, high = (float(v) for v in observer.chosen_range(None))
    shrunk = np.exp2(-np.arange(64) / 8)
    others = [(low, x.max() * s) for s in shrunk] + [(x.min() * s, high) for s in shrunk]
    assert cost(low, high) < 0.9 * cost(x.min(), x.max())
    assert cost(low, high) <= 1.05 * min(cost(*pair) for pair in others)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 40)),
    spread=st.integers(0, 30),
)
def test_tables_are_numpys_and_join_in_any_order(
    seed: int, shape: tuple[int, int, int], spread: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-spread, spread + 1, shape[:2], generator=generator)
    x = torch.randn(shape, generator=generator) * torch.exp2(sizes.float()).unsqueeze(-1)
    x[0, 0] = 0
    whole = add_tokens(None, x)
    assert torch.equal(add_tokens(None, x, backend="reference"), whole)
    cut = len(x) // 2
    parts = [add_tokens(None, part) for part in (x[:cut], x[cut:]) if len(part)]
    for order in (parts, parts[::-1]):
        joined = order[0] if len(order) == 1 else joined_tables(*order)
        assert torch.equal(joined, whole)
    for row in whole:
        parameter, size = int(row[0]), int(row[1])
        peaks = x[:, parameter].abs().amax(-1)
        known = torch.where(peaks == 0, -107, torch.frexp(peaks).exponent - 1)
        chosen = x[known == size, parameter].double().numpy()
        counts, _ = np.histogram(chosen, bins=BINS, range=(-(2.0 ** (size + 1)), 2.0 ** (size + 1)))
        # NumPy puts a negative edge into the bin above, we into the one below
        edges = np.isin(chosen, -(np.arange(1, BINS // 2) * 2.0 ** (size - 9)))
        if not edges.any():
            assert row[KEYS:].tolist() == counts.tolist()
        assert int(row[KEYS:].sum()) == chosen.size
    assert int(whole[:, KEYS:].sum()) == x.numel()


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("huge", [1.0, 20.0, 300.0, 30000.0])
def test_unserved_if_most_tokens_lose_half_of_their_norm(kind: str, huge: float) -> None:
    """The largest values of most tokens are above half a step, but little else of them is."""
    values = tokens_of(huge)
    observer = observed(values, type=kind, relative=0.0)
    scale = float(observer.get_qparams()["scale"])
    x = np.concatenate([v.double().numpy().reshape(-1, 96) for v in values])
    off = np.linalg.norm(rounded(x / scale, kind) * scale - x, axis=1) / np.linalg.norm(x, axis=1)
    assert np.abs(np.median(off) - 0.5) > 0.1, "near the threshold, bins decide"
    reason = observer.unserved()
    assert (reason is not None and "lose half of their norm" in reason) == (np.median(off) > 0.5)


@pytest.mark.parametrize("huge", [3.0, 12.0, 40.0, 300.0])
def test_unserved_if_the_range_cuts_off_half_of_a_token(huge: float) -> None:
    """Relative to its token a huge value counts no more than others, so the range cuts it off."""
    values = [value.clone() for value in tokens_of()]
    for value in values:
        value[:, 0] = 0.3
        value[:, 0, 5] = huge
    observer = observed(values, relative=1.0)
    scale = float(observer.get_qparams()["scale"])
    x = np.concatenate([v.double().numpy().reshape(-1, 96) for v in values])
    off = np.linalg.norm(rounded(x / scale, "int") * scale - x, axis=1) / np.linalg.norm(x, axis=1)
    beyond = np.abs(x).max(1) > 127.5 * scale
    assert np.median(off) < 0.5
    reason = observer.unserved()
    assert (reason is not None) == bool((off[beyond] > 0.5).any()) == (huge > 12)
    assert reason is None or reason == "the range cuts off half of the norm of 1.56% of the tokens"


def test_too_many_histograms_and_damaged_tables_are_refused(tmp_path) -> None:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    wide = Observer.load_from_registry("token_mse", base_name="weight", args=args)
    with pytest.raises(StrategyError, match="131,072 histograms would take"):
        wide(torch.zeros(4096, 1024))
    observer = observed(tokens_of())
    observer.save_statistics(tmp_path / "s")
    for change, message in (
        (lambda t: t[:, :-1].clone(), "shape"),
        (lambda t: t.double(), "float64"),
        (lambda t: -t, "below zero|other parameters"),
        (lambda t: t + 1, "other parameters"),
    ):
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        with safe_open(tmp_path / "s", framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(tmp_path / "s")
        tensors["token_table"] = change(tensors["token_table"])
        save_file(tensors, tmp_path / "damaged", metadata=metadata)
        with pytest.raises(StatisticsError, match=message):
            observed(tokens_of()).load_statistics(tmp_path / "damaged")
