"""`percentile`, `entropy` and `histogram_mse` against NumPy on all values; headroom."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from steelyard.errors import OptionError, StatisticsError, StrategyError
from steelyard.kernels.bin_counts import BINS
from steelyard.observers import Observer

HALF = BINS // 2


def batches(skew: float = 0.0) -> list[torch.Tensor]:
    """Heavy-tailed activations, (batch, seq, hidden) each; the later ones reach further."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(2, 40, 64, generator=generator) * (1 + i) for i in range(4)]
    found[2][0, 5, 9], found[3][1, 1, 1] = 90.0, -35.0
    return [(x + skew * x.abs()).bfloat16() for x in found]


def observed(name: str, values: list[torch.Tensor], **options) -> Observer:
    kind = {k: options.pop(k) for k in ("num_bits", "type", "symmetric") if k in options}
    args = QuantizationArgs(**{"num_bits": 8, "strategy": "tensor", **kind})
    observer = Observer.load_from_registry(name, base_name="input", args=args, **options)
    for value in values:
        observer(value)
    return observer


def all_values(values: list[torch.Tensor]) -> np.ndarray:
    return np.concatenate([v.double().numpy().ravel() for v in values])


def width_of(observer: Observer) -> float:
    return 2.0 ** int(observer.histogram.flatten()[0])


def range_chosen(observer: Observer) -> tuple[float, float]:
    low, high = observer.chosen_range(None)
    return float(low), float(high)


def numpy_percentile(x: np.ndarray, percentile: float) -> float:
    """The least value that so many do not exceed; a mean of two would lie between them."""
    return float(np.percentile(x, percentile, method="inverted_cdf"))


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9, 99.99, 100.0])
def test_percentile_is_numpys_within_a_bin(percentile: float) -> None:
    values = batches(skew=0.3)
    x = all_values(values)
    symmetric = observed("percentile", values, percentile=percentile)
    width = width_of(symmetric)
    low, high = range_chosen(symmetric)
    assert low == -high
    assert high == pytest.approx(numpy_percentile(np.abs(x), percentile), abs=width)
    assert np.mean(np.abs(x) <= high) >= percentile / 100

    two_sided = observed("percentile", values, percentile=percentile, symmetric=False)
    low, high = range_chosen(two_sided)
    rest = (100 - percentile) / 2
    assert low == pytest.approx(-numpy_percentile(-x, 100 - rest), abs=width)
    assert high == pytest.approx(numpy_percentile(x, 100 - rest), abs=width)
    assert np.mean((x >= low) & (x <= high)) >= percentile / 100
    if percentile == 100:
        assert (low, high) == (x.min(), x.max())


# -- brute force --------------------------------------------------------------------------


def rounded(codes: np.ndarray, kind: str) -> np.ndarray:
    """Codes of a type, by NumPy."""
    if kind == "int":
        return np.round(np.clip(codes, -128, 127))
    codes = np.clip(codes, -448, 448)
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(codes), 1e-30))), -6)
    step = np.exp2(exponent - 3)
    return np.round(codes / step) * step


def stored(scale: float) -> float:
    return float(torch.tensor(scale, dtype=torch.float32).bfloat16())


def spread_values(x: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Points that stand for the filled bins, and how often each counts."""
    parts = 16
    place = np.where(x < 0, -1 - np.floor(-x / width), np.floor(x / width))
    place = np.where(x == 0, 0, place)
    bins, counts = np.unique(place, return_counts=True)
    inner = (np.arange(parts) + 0.5) / parts
    return (bins[:, None] + inner) * width, counts / parts


@pytest.mark.parametrize("kind", ["int", "float"])
def test_least_squares_is_brute_force_over_all_edges(kind: str) -> None:
    values = batches()
    x = all_values(values)
    observer = observed("histogram_mse", values, type=kind)
    width, absmax = width_of(observer), np.abs(x).max()
    points, weights = spread_values(x, width)
    levels = 127.5 if kind == "int" else 448.0

    def error(largest: float) -> float:
        scale = stored(largest / levels)
        off = rounded(points / scale, kind) * scale - points
        return float((np.square(off).sum(-1) * weights).sum())

    edges = [k * width for k in range(1, HALF + 1) if k * width < absmax]
    errors = {largest: error(largest) for largest in [absmax, *edges]}
    _, chosen = range_chosen(observer)
    assert chosen in errors
    # points stand for bins, the observer integrates over them
    assert errors[chosen] <= min(errors.values()) * 1.02
    assert errors[chosen] < errors[absmax] or kind == "float"


def test_least_squares_with_a_zero_point_has_no_better_end() -> None:
    values = batches(skew=0.6)
    x = all_values(values)
    observer = observed("histogram_mse", values, symmetric=False)
    width = width_of(observer)
    points, weights = spread_values(x, width)

    def error(low: float, high: float) -> float:
        scale = stored((high - low) / 255)
        zero_point = np.round(np.clip(-128 - low / scale, -128, 127))
        off = (rounded(points / scale + zero_point, "int") - zero_point) * scale - points
        return float((np.square(off).sum(-1) * weights).sum())

    low, high = range_chosen(observer)
    least = error(low, high)
    assert least < error(x.min(), x.max())
    other_highs = [k * width for k in range(8, HALF, 8) if k * width < x.max()]
    other_lows = [-k * width for k in range(8, HALF, 8) if -k * width > x.min()]
    pairs = [(low, h) for h in other_highs] + [(v, high) for v in other_lows]
    assert least <= 1.02 * min(error(*pair) for pair in pairs)


def test_entropy_is_brute_force_over_all_edges() -> None:
    generator = torch.Generator().manual_seed(6)
    values = [torch.randn(1, 2000, 100, generator=generator) for _ in range(2)]
    values = [(x * x.abs()).bfloat16() for x in values]
    x = all_values(values)
    observer = observed("entropy", values)
    width, absmax = width_of(observer), np.abs(x).max()
    place = np.where(x < 0, -1 - np.floor(-x / width), np.floor(x / width)).astype(int)
    counts = np.bincount(place + HALF, minlength=BINS).astype(float)
    centers = (np.arange(-HALF, HALF) + 0.5) * width

    def divergence(edge: int) -> float:
        scale = stored(min(edge * width, absmax) / 127.5)
        inside = slice(HALF - edge, HALF + edge)
        q = counts[inside]
        p = q.copy()
        p[0] += counts[: HALF - edge].sum()
        p[-1] += counts[HALF + edge :].sum()
        filled = p > 0
        code = (rounded(centers[inside] / scale, "int") + 128).astype(int)
        mass = np.bincount(code, q, minlength=256)
        bins = np.bincount(code, filled, minlength=256)
        spread = mass[code] / np.maximum(bins[code], 1)
        if (spread[filled] == 0).any():
            return np.inf
        p, spread = p[filled] / p.sum(), spread[filled] / q.sum()
        return float((p * np.log(p / spread)).sum())

    found = {min(k * width, absmax): divergence(k) for k in range(HALF, 127, -1)}
    _, chosen = range_chosen(observer)
    assert found[chosen] == pytest.approx(min(found.values()), rel=1e-9)
    assert chosen < absmax


# -- statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["percentile", "entropy", "histogram_mse"])
def test_order_and_partition_change_nothing(name: str) -> None:
    values = batches()
    whole = observed(name, values)
    backwards = observed(name, values[::-1])
    merged = observed(name, values[2:]).merge(observed(name, values[:2]))
    for other in (backwards, merged):
        assert torch.equal(other.histogram, whole.histogram)
        assert other.get_qparams()["scale"] == whole.get_qparams()["scale"]
    assert whole.histogram.shape == (1, 1 + BINS)
    assert int(whole.histogram[0, 1:].sum()) == sum(v.numel() for v in values)


def test_heads_have_ranges_of_their_own() -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="attn_head")
    x = torch.randn(2, 3, 50, 16, generator=torch.Generator().manual_seed(4))
    x *= torch.tensor([0.01, 1, 300]).reshape(1, 3, 1, 1)
    for name in ("percentile", "entropy", "histogram_mse", "token_mse"):
        together = Observer.load_from_registry(name, base_name="k", args=args)(x)
        for head in range(3):
            alone = Observer.load_from_registry(name, base_name="k", args=args)(x[:, [head]])
            expected = alone.get_qparams()["scale"].flatten()
            torch.testing.assert_close(
                together.get_qparams()["scale"].flatten()[[head]], expected, rtol=0, atol=0
            )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t[..., :-1].clone(), "shape"),
        (lambda t: t.int(), "type int32"),
        (lambda t: torch.cat([t[..., :1] + 5000, t[..., 1:]], -1), "width"),
        (lambda t: torch.cat([t[..., :1], t[..., 1:] - 1], -1), "below zero"),
        (lambda t: torch.cat([t[..., :1], 0 * t[..., 1:]], -1), "none"),
        (None, "no histogram"),
    ],
)
def test_damaged_histogram_is_refused(damage, message: str, tmp_path) -> None:
    path = tmp_path / "statistics.safetensors"
    observer = observed("histogram_mse", batches())
    observer.save_statistics(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    if damage is None:
        del tensors["histogram"]
    else:
        tensors["histogram"] = damage(tensors["histogram"])
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(StatisticsError, match=message):
        observed("histogram_mse", []).load_statistics(path)


def test_histograms_of_too_many_groups_are_refused() -> None:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=1)
    observer = Observer.load_from_registry("histogram_mse", base_name="weight", args=args)
    with pytest.raises(StrategyError, match="GiB; for weights in groups use optimal"):
        observer(torch.zeros(257, 256))
    assert not observer.has_statistics


# -- headroom -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["static_minmax", "minmax", "mse", "percentile", "entropy", "histogram_mse", "token_mse"],
)
def test_headroom_enlarges_what_the_global_scale_reaches(name: str) -> None:
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(5))
    plain, roomy = (
        Observer.load_from_registry(name, base_name="input", args=args, **options)(x)
        for options in ({}, {"headroom": 1.5})
    )
    # a global scale is 448 * 6 over the largest magnitude
    largest = {o: 448 * 6 / float(o.get_qparams()["global_scale"]) for o in (plain, roomy)}
    assert largest[plain] == pytest.approx(float(x.abs().max()), rel=1e-6)
    assert largest[roomy] == pytest.approx(1.5 * float(x.abs().max()), rel=1e-6)


@pytest.mark.parametrize(("base", "strategy"), [("input", "tensor"), ("weight", "tensor_group")])
def test_headroom_without_effect_is_refused(base: str, strategy: str) -> None:
    args = QuantizationArgs(
        num_bits=4 if strategy == "tensor_group" else 8,
        type="float",
        strategy=strategy,
        group_size=16 if strategy == "tensor_group" else None,
    )
    with pytest.raises(OptionError, match=f"no effect on the {base}"):
        Observer.load_from_registry("static_minmax", base_name=base, args=args, headroom=2.0)
