"""The costs of ranges against sums over many values, spread evenly over the bins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.kernels.bin_counts import BINS
from steelyard.kernels.range_costs import divergences, errors_of
from steelyard.kernels.rounding import reconstruct

HALF = BINS // 2
TYPES = {
    "int8": {"num_bits": 8},
    "int4_asym": {"num_bits": 4, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float"},
    "fp4": {"num_bits": 4, "type": "float"},
}
# scale in bins, zero point: fine and coarse codes, ranges that clip on both sides
CASES = {
    "int8": [(8.1, 0), (0.63, 0), (3.0, 0)],
    "int4_asym": [(130.7, -1), (20.2, 5), (0.4, 0)],
    "fp8": [(2.4, 0), (0.11, 0), (0.9, 0)],
    "fp4": [(170.0, 0), (33.3, 0)],
}


def counts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    places = (torch.randn(4000, generator=generator) * 90).round().long().clamp(-HALF, HALF - 1)
    places[:3] = torch.tensor([1000, -1023, 700])
    return torch.bincount(places + HALF, minlength=BINS)


@pytest.mark.parametrize("backend", ["reference", "compiled"])
@pytest.mark.parametrize("name", TYPES)
def test_errors_are_the_sum_over_values(name: str, backend: str) -> None:
    args = QuantizationArgs(strategy="tensor", **TYPES[name])
    given = counts()
    spread = 500
    inner = (torch.arange(spread, dtype=torch.float64) + 0.5) / spread
    values = torch.arange(-HALF, HALF, dtype=torch.float64).unsqueeze(-1) + inner
    for unit, zero_point in CASES[name]:
        u, z = torch.tensor([[unit]]).double(), torch.tensor([[zero_point]]).double()
        off = (reconstruct(values, u, z, args) - values).abs()
        for norm in (2.0, 1.0, 2.4):
            wanted = (off**norm).mean(-1) @ given.double()
            found = errors_of(given.unsqueeze(0), u, z, args, norm, backend)
            torch.testing.assert_close(found[0, 0], wanted, rtol=1e-4, atol=0)


def textbook_divergence(
    given: np.ndarray, first: int, last: int, code_of: dict[int, float]
) -> float:
    """Entropy calibration, bin by bin; edges count from the first bin."""
    inside = {b: int(given[b]) for b in range(first, last)}
    p = dict(inside)
    p[first] += int(given[:first].sum())
    p[last - 1] += int(given[last:].sum())
    filled = [b for b in p if p[b] > 0]
    q = {}
    for code in {code_of[b] for b in filled}:
        members = [b for b in filled if code_of[b] == code]
        for b in members:
            q[b] = sum(inside[m] for m in members) / len(members)
    total_p, total_q = sum(p.values()), sum(inside.values())
    if any(q[b] == 0 for b in filled):
        return math.inf
    return sum(p[b] / total_p * math.log((p[b] / total_p) / (q[b] / total_q)) for b in filled)


@pytest.mark.parametrize("backend", ["reference", "compiled"])
@pytest.mark.parametrize("name", TYPES)
def test_divergence_is_the_textbook_one(name: str, backend: str) -> None:
    args = QuantizationArgs(strategy="tensor", **TYPES[name])
    given = counts()
    largest = {"int8": 127, "int4_asym": 7, "fp8": 448, "fp4": 6}[name]
    endings = [(-HALF, HALF), (-200, 200), (-130, 90), (-3, 900)]
    for low, high in endings:
        unit = torch.tensor([[1.0007 * max(-low, high) / largest]]).double()  # no ties
        centers = torch.arange(-HALF, HALF).double() + 0.5
        codes = reconstruct(centers, unit[0], None, args) / unit[0]
        code_of = {b: round(float(code), 6) for b, code in enumerate(codes)}
        wanted = textbook_divergence(given.numpy(), low + HALF, high + HALF, code_of)
        ends = torch.tensor([low, high]).reshape(2, 1, 1)
        found = divergences(given.unsqueeze(0), unit, torch.zeros_like(unit), ends, args, backend)
        if math.isinf(wanted):
            assert float(found) == torch.finfo(torch.float64).max
        else:
            assert float(found) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
