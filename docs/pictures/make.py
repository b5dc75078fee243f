"""Draw the pictures of docs/observers.md, one for each observer, with the observers themselves.

    python docs/pictures/make.py      # from the root of the repository

The weights and activations are made up, by a formula and not by chance: normal quantiles in the
order of the golden ratio, and a few values that stand out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist

import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard import Observer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from svg import LEFT, RIGHT, Axis, Picture, strip  # noqa: E402

INT4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GOLDEN = 0.6180339887498949
BATCHES = 80
SPREAD = Axis(-0.19, 0.19)


def normal(count: int, start: int = 0) -> list[float]:
    """Return values that are spread as a normal distribution is."""
    points = [((start + i + 1) * GOLDEN) % 1 for i in range(count)]
    return [NormalDist().inv_cdf(0.01 + 0.98 * p) for p in points]


def weights() -> list[float]:
    """Return a group of 128 weights, one of them an outlier."""
    row = [0.05 * value for value in normal(128, start=20)]
    row[7] = 0.16
    return row


def importance() -> list[float]:
    """Return the mean square input of each column: large for some with small weights."""
    return [36.0 if abs(w) < 0.04 and i % 4 == 0 else 1.0 for i, w in enumerate(weights())]


def qparams(
    name: str,
    row: Sequence[float],
    args: dict[str, object],
    squares: Sequence[float] | None = None,
    **options: object,
) -> tuple[float, float]:
    """Return the scale of the first group, and the global scale (1 where there is none)."""
    checked = QuantizationArgs(**args)
    observer = Observer.load_from_registry(name, base_name="weight", args=checked, **options)
    weight = torch.tensor([row], dtype=torch.bfloat16)
    if squares is not None:
        layer = torch.nn.Linear(len(row), 1, bias=False)
        observer.attach(layer)
        layer(torch.tensor([squares]).sqrt())
        observer.detach(layer)
    found = observer(weight).get_qparams()
    divisor = found["global_scale"]
    return float(found["scale"].flatten()[0]), 1.0 if divisor is None else float(divisor)


def int4_codes(scale: float) -> list[float]:
    return sorted(code * scale for code in range(-8, 8))


def fp4_codes(scale: float) -> list[float]:
    return sorted({sign * value * scale for value in FP4 for sign in (-1, 1)})


def error(
    row: Sequence[float], codes: Sequence[float], squares: Sequence[float] | None = None
) -> float:
    """Return the squared error of storing each value as the nearest code."""
    weighted = squares or [1.0] * len(row)
    return sum(s * min((v - c) ** 2 for c in codes) for v, s in zip(row, weighted, strict=True))


def memoryless_minmax() -> Picture:
    row = weights()
    scale, _ = qparams("memoryless_minmax", row, INT4)
    picture = Picture("memoryless_minmax: the range of the weights, cut into 15 steps", 112)
    axis = SPREAD
    strip(
        picture,
        24,
        f"scale {scale:.4f}, error {1e3 * error(row, int4_codes(scale)):.2f}",
        row,
        int4_codes(scale),
        axis,
    )
    y = 84
    bound = max(map(abs, row))
    picture.line(axis(-bound), y, axis(bound), y, "range")
    for end in (-bound, bound):
        picture.line(axis(end), y - 5, axis(end), y + 5, "range")
    picture.text(axis(0), y + 16, "the largest magnitude, on both sides", "soft mid")
    return picture


def memoryless_mse() -> Picture:
    row = weights()
    whole, _ = qparams("memoryless_minmax", row, INT4)
    scale, _ = qparams("memoryless_mse", row, INT4)
    picture = Picture("memoryless_mse: the multiple of the range with the least error", 306)
    factors = [1 - i / 100 for i in range(21)]
    costs = [
        sum(min(abs(v - c) for c in int4_codes(p * whole)) ** 2.4 for v in row) for p in factors
    ]
    across = Axis(1.0, 0.8)
    up = Axis(0.9 * min(costs), max(costs), 140, 34)
    picture.text(LEFT, 22, "sum of |error|^2.4 over p, the part of the range that is kept", "soft")
    picture.line(LEFT, 140, RIGHT, 140, "axis")
    picture.curve([(across(p), up(c)) for p, c in zip(factors, costs, strict=True)], "curve")
    for p, c in zip(factors, costs, strict=True):
        picture.dot(across(p), up(c), 3, "value")
    best = min(range(len(costs)), key=costs.__getitem__)
    picture.dot(across(factors[best]), up(costs[best]), 7, "best")
    picture.text(LEFT, 156, "p = 1", "soft")
    picture.text(RIGHT, 156, "p = 0.8", "soft end")
    axis = SPREAD
    compare(picture, 186, row, axis, [("memoryless_minmax", whole), ("memoryless_mse", scale)])
    return picture


def compare(
    picture: Picture,
    top: float,
    row: Sequence[float],
    axis: Axis,
    scales: Sequence[tuple[str, float]],
    codes: Callable[[float], list[float]] = int4_codes,
    squares: Sequence[float] | None = None,
) -> None:
    """Draw one strip for each observer."""
    sizes = None if squares is None else [1.5 + s**0.5 for s in squares]
    kind = "error" if squares is None else "weighted error"
    for i, (name, scale) in enumerate(scales):
        stored = codes(scale)
        label = f"{name}: scale {scale:.4f}, {kind} {1e3 * error(row, stored, squares):.2f}"
        strip(picture, top + 64 * i, label, row, stored, axis, sizes)


def optimal() -> Picture:
    row = weights()
    whole, _ = qparams("memoryless_minmax", row, INT4)
    searched, _ = qparams("memoryless_mse", row, INT4)
    exact, _ = qparams("optimal", row, INT4, norm=2.0)
    mirrored, _ = qparams("optimal", row, INT4, norm=2.0, negative_scales=True)
    picture = Picture("optimal, norm 2: every scale that bf16 has, and the best of them", 386)
    scales = bf16_between(0.6 * whole, 1.1 * whole)
    costs = [error(row, int4_codes(s)) for s in scales]
    across = Axis(scales[0], scales[-1])
    up = Axis(0.8 * min(costs), max(costs), 150, 34)
    picture.text(LEFT, 22, "squared error of each scale that bf16 can store", "soft")
    picture.line(LEFT, 150, RIGHT, 150, "axis")
    for s, c in zip(scales, costs, strict=True):
        picture.dot(across(s), up(c), 2, "value")
    for name, s, above, kind in (
        ("memoryless_minmax", whole, 14, "mid"),
        ("memoryless_mse", searched, 34, "mid"),
        ("optimal", exact, 14, "end"),
    ):
        y = up(error(row, int4_codes(s)))
        picture.dot(across(s), y, 7, "best")
        picture.text(across(s), y - above, name, kind)
    picture.text(LEFT, 166, f"scale {scales[0]:.3f}", "soft")
    picture.text(RIGHT, 166, f"scale {scales[-1]:.3f}", "soft end")
    named = [("memoryless_mse", searched), ("optimal", exact), ("with negative_scales", mirrored)]
    compare(picture, 196, row, SPREAD, named)
    return picture


def bf16_between(low: float, high: float) -> list[float]:
    first = int(torch.tensor(low, dtype=torch.bfloat16).view(torch.int16))
    last = int(torch.tensor(high, dtype=torch.bfloat16).view(torch.int16))
    bits = torch.arange(first, last + 1, dtype=torch.int16)
    return [float(v) for v in bits.view(torch.bfloat16).tolist()]


def imatrix_mse() -> Picture:
    row, squares = weights(), importance()
    picture = Picture("imatrix_mse: large dots are columns with large inputs", 150)
    plain, _ = qparams("memoryless_mse", row, INT4)
    weighted, _ = qparams("imatrix_mse", row, INT4, squares)
    named = [("memoryless_mse", plain), ("imatrix_mse", weighted)]
    compare(picture, 24, row, SPREAD, named, squares=squares)
    return picture


def fp4_group() -> list[float]:
    """Return a group of 16 with values at three quarters of its largest, and three more groups."""
    group = [0.1, -0.099, 0.076, -0.074, 0.075, -0.05, 0.049, 0.037, -0.038, 0.026, -0.025, 0.012]
    group += [-0.013, 0.001, -0.077, 0.066]
    return [*group, *(0.1 * value for value in normal(48, start=16))]


def nvfp4_expanded_mse() -> Picture:
    row = fp4_group()
    picture = Picture("nvfp4_expanded_mse: the largest value stored as 4 instead of 6", 150)
    named = []
    for name in ("memoryless_minmax", "nvfp4_expanded_mse"):
        scale, divisor = qparams(name, row, NVFP4)
        named.append((name, scale / divisor))
    compare(picture, 24, row[:16], Axis(-0.16, 0.16), named, fp4_codes)
    return picture


def nvfp4_expanded_imatrix() -> Picture:
    row = fp4_group()
    squares = [20.0 if i == 15 else 1.0 for i in range(len(row))]
    picture = Picture("nvfp4_expanded_imatrix: the same, weighted by the inputs", 150)
    named = []
    for name in ("nvfp4_expanded_mse", "nvfp4_expanded_imatrix"):
        scale, divisor = qparams(name, row, NVFP4, squares if "imatrix" in name else None)
        named.append((name, scale / divisor))
    compare(picture, 24, row[:16], Axis(-0.16, 0.16), named, fp4_codes, squares[:16])
    return picture


def batches() -> list[torch.Tensor]:
    """Return activations whose range drifts, some with an outlier."""
    made = []
    for k in range(BATCHES):
        values = [(1 + 0.006 * k) * v for v in normal(512, start=512 * k)]
        if k % 17 == 5:
            values[3] = 7.0
        made.append(torch.tensor(values).reshape(1, 4, 128))
    return made


def over_batches(
    title: str, runs: Sequence[tuple[str, str, dict[str, object], str, int]]
) -> Picture:
    """Draw the range of each batch, and the upper end that observers hold after it."""
    picture = Picture(title, 224)
    up, across = Axis(-4, 8, 190, 30), Axis(0, BATCHES - 1, LEFT + 8, RIGHT - 150)
    picture.text(LEFT, 22, "the range of each batch, and the range held after it", "soft")
    for k, batch in enumerate(batches()):
        low, high = float(batch.min()), float(batch.max())
        picture.line(across(k), up(low), across(k), up(high), "guide")
    args = QuantizationArgs(num_bits=4, strategy="tensor", symmetric=False)
    for name, label, options, kind, above in runs:
        observer = Observer.load_from_registry(name, base_name="input", args=args, **options)
        lows, highs = [], []
        for batch in batches():
            observer(batch)
            lows.append(float(observer.min_vals))
            highs.append(float(observer.max_vals))
        for ends in (lows, highs):
            picture.curve([(across(k), up(end)) for k, end in enumerate(ends)], kind)
        colour = "first" if kind == "curve" else "other"
        picture.text(RIGHT - 142, up(highs[-1]) + above, label, colour)
    picture.text(LEFT, 212, "first batch", "soft")
    picture.text(across(BATCHES - 1), 212, f"batch {BATCHES}", "soft end")
    return picture


def static_minmax() -> Picture:
    return over_batches(
        "static_minmax: the range of all batches",
        [("static_minmax", "static_minmax", {}, "second", 4)],
    )


def minmax() -> Picture:
    slow, fast = {"averaging_constant": 0.01}, {"averaging_constant": 0.2}
    return over_batches(
        "minmax: a moving average of the ranges",
        [
            ("minmax", "constant 0.01", slow, "second", 10),
            ("minmax", "constant 0.2", fast, "curve", -4),
        ],
    )


def mse() -> Picture:
    fast = {"averaging_constant": 0.2}
    return over_batches(
        "mse: a moving average of the best ranges",
        [
            ("minmax", "minmax, constant 0.2", fast, "curve", -6),
            ("mse", "mse, constant 0.2", fast, "second", 10),
        ],
    )


def over_counts(
    title: str, bits: int, runs: Sequence[tuple[str, str, dict[str, object], str, int]]
) -> Picture:
    """Draw the counts of all batches, and the ranges that observers choose from them."""
    picture = Picture(title, 206)
    args = QuantizationArgs(num_bits=bits, strategy="tensor")
    found = []
    for name, label, options, kind, height in [*runs, ("histogram", "", {}, "", 0)]:
        observer = Observer.load_from_registry(name, base_name="input", args=args, **options)
        for batch in batches():
            observer(batch)
        found.append((observer, label, kind, height))
    histogram = found.pop()[0].histogram[0]
    width = 2.0 ** int(histogram[0])
    up, across = Axis(0, 13, 176, 34), Axis(-1024 * width, 1024 * width)
    picture.text(LEFT, 22, f"values of all batches in bins, logarithmic; int{bits}", "soft")
    picture.line(LEFT, 176, RIGHT, 176, "axis")
    for first in range(0, 2048, 8):  # eight bins are one line
        count = int(histogram[1 + first : 9 + first].sum())
        if count:
            x = across((first + 4 - 1024) * width)
            picture.line(x, 176, x, up(1 + (count.bit_length() - 1)), "guide")
    for observer, label, kind, height in found:
        end = max(float(v.abs()) for v in observer.chosen_range(None))
        for x in (across(-end), across(end)):
            picture.line(x, height - 4, x, 182, kind)
        colour = "first" if kind == "curve" else "other"
        picture.text(across(end) - 6, height + 8, label, f"{colour} end")
    picture.text(across(0), 198, "0", "soft mid")
    return picture


def percentile() -> Picture:
    return over_counts(
        "percentile: the range that holds a share of all values",
        8,
        [
            ("percentile", "100", {"percentile": 100.0}, "curve", 40),
            ("percentile", "99.9", {"percentile": 99.9}, "second", 60),
        ],
    )


def entropy() -> Picture:
    return over_counts(
        "entropy: the range whose codes keep the distribution",
        4,
        [
            ("static_minmax", "static_minmax", {}, "curve", 40),
            ("entropy", "entropy", {}, "second", 60),
        ],
    )


def histogram_mse() -> Picture:
    return over_counts(
        "histogram_mse: the range with the least squared error",
        4,
        [
            ("static_minmax", "static_minmax", {}, "curve", 40),
            ("histogram_mse", "histogram_mse", {}, "second", 60),
        ],
    )


def token_mse() -> Picture:
    return over_counts(
        "token_mse: the range with the least error, weighed by the size of tokens",
        4,
        [
            ("static_minmax", "static_minmax", {}, "curve", 40),
            ("token_mse", "token_mse", {}, "second", 60),
        ],
    )


DRAWN = (
    memoryless_minmax,
    static_minmax,
    minmax,
    memoryless_mse,
    mse,
    percentile,
    entropy,
    histogram_mse,
    token_mse,
    optimal,
    imatrix_mse,
    nvfp4_expanded_mse,
    nvfp4_expanded_imatrix,
)


def pictures() -> dict[str, str]:
    """Return the text of every picture, by the name of its observer."""
    return {draw.__name__: str(draw()) for draw in DRAWN}


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / f"{name}.svg").write_text(text, encoding="utf-8")
