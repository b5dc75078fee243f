"""Histograms and the costs of ranges: compiled against the reference, at each instruction set."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.testing import assert_close

from steelyard.kernels.bin_counts import BINS, add_counts, add_values
from steelyard.kernels.range import range_of
from steelyard.kernels.range_costs import divergences, errors_of

SHAPES = [(300, 1, 70), (1, 1, 300_001), (9, 4, 1, 1, 24), (700, 3, 16), (1, 5, 3, 128)]
TYPES = {
    "int8": {"num_bits": 8},
    "int4": {"num_bits": 4, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float"},
    "fp4": {"num_bits": 4, "type": "float"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_counts(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)
    for observed in (x, x.transpose(0, -1).contiguous().transpose(0, -1), x[..., :1].expand(shape)):
        seen = range_of(observed)
        before = add_values(None, observed / 7, range_of(observed / 7), 1, "reference")
        got, expected = (
            add_values(before, observed, seen, 1, b) for b in ("compiled", "reference")
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("shape", [(300, 1, 70), (40, 1, 3000), (9, 3, 128)], ids=str)
def test_counts_of_some_observations(isa: str, shape: tuple[int, ...], backend: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rows = torch.tensor([len(x) - 1, 0, 5, 7, 5])
    for observed in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        got, expected = (torch.zeros(shape[1], 1 + BINS, dtype=torch.int64) for _ in range(2))
        got[:, 0] = expected[:, 0] = -7  # bins of 2^-7, for values up to 8
        add_counts(observed, got, 1, backend, rows)
        add_counts(observed[rows].contiguous(), expected, 1, "reference")
        assert torch.equal(got, expected)


def test_observations_must_exist(isa: str) -> None:
    histogram = torch.zeros(1, 1 + BINS, dtype=torch.int64)
    for row in (-1, 3):
        with pytest.raises(ValueError, match="rows must be numbers of observations"):
            add_counts(torch.zeros(3, 1, 8), histogram, 1, "compiled", torch.tensor([row]))


def test_threads_change_nothing(isa: str) -> None:
    x = torch.randn(3000, 1, 256, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(add_values(None, x, range_of(x), 1, "compiled"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", TYPES)
def test_costs(isa: str, name: str) -> None:
    args = QuantizationArgs(strategy="tensor", **TYPES[name])
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 2, 8, generator=generator) ** 3
    counts = add_values(None, x, range_of(x))[:, 1:]
    edges = torch.arange(BINS // 2, 0, -21)
    ends = torch.stack([-edges, edges]).unsqueeze(1).expand(2, 2, -1).contiguous()
    levels = 2 ** (args.num_bits - 1) if args.type == "int" else 448 if args.num_bits == 8 else 6
    unit = (ends[1] / levels).double()
    zero_point = torch.zeros_like(unit)
    if not args.symmetric:
        ends[0] //= 2
        unit, zero_point = unit * 0.75, zero_point - 3
    expected = divergences(counts, unit, zero_point, ends, args, "reference")
    assert_close(divergences(counts, unit, zero_point, ends, args, "compiled"), expected)

    for norm in (1.0, 2.0, 2.4):
        expected = errors_of(counts, unit, zero_point, args, norm, "reference")
        check_errors(errors_of(counts, unit, zero_point, args, norm, "compiled"), expected)


def check_errors(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Alike where the compiled kernel judged; elsewhere an earlier candidate was better."""
    judged = got < torch.finfo(got.dtype).max
    assert judged[:, 0].all()
    assert_close(got[judged], expected[judged], rtol=1e-9, atol=0)
    best_before = expected.cummin(-1).values[:, :-1]
    assert bool((expected[:, 1:][~judged[:, 1:]] > best_before[~judged[:, 1:]]).all())
    assert torch.equal(got.argmin(-1), expected.argmin(-1))
