"""Triton's packing, interpreted, against the reference: the same bytes."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from torch.testing import assert_close

from steelyard.kernels.pack import quantize_and_pack, squared_error
from steelyard.observers import Observer

pytestmark = pytest.mark.usefixtures("interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = [
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "W8A8",
    "FP8",
    "FP8_BLOCK",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8A16",
]


def weight(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.05
    x[0, :5] = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 0.4])
    x[1] = 0
    x[2, :2] = torch.tensor([1e-41, -1e-41])
    return x.to(dtype)


def raw(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(torch.uint8)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_bytes_and_errors(scheme_name: str, exact: bool) -> None:
    args = preset_name_to_scheme(scheme_name, ["Linear"]).weights
    packed = scheme_name in ("W4A16", "W4A16_ASYM", "W8A16")
    for dtype in DTYPES:
        x = weight(dtype, 7, 256)
        observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
        q = observer(x).get_qparams()
        shared = (x, q["scale"], q["zero_point"], args, q["global_scale"])
        results = []
        for backend in ("triton", "reference"):
            errors = torch.empty(len(x), dtype=torch.float64)
            stored = quantize_and_pack(
                *shared, packed=packed, exact=exact, backend=backend, errors=errors
            )
            results.append((stored, errors))
        (ours, our_errors), (theirs, their_errors) = results
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert_close(raw(ours), raw(theirs), rtol=0, atol=0)
        assert_close(our_errors, their_errors, rtol=1e-12, atol=0)
    error = squared_error(*shared, exact=exact, backend="triton")
    assert error == pytest.approx(float(their_errors.sum()), rel=1e-12)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_words_of_every_width(bits: int) -> None:
    """Codes that lie in two words among them, and rows that end within a word."""
    args = QuantizationArgs(num_bits=bits, strategy="channel")
    for columns in (32, 97):
        x = torch.randn(9, columns, generator=torch.Generator().manual_seed(bits))
        scale, _ = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)(
            x
        )
        results = []
        for backend in ("triton", "reference"):
            errors = torch.empty(9, dtype=torch.float64)
            stored = quantize_and_pack(x, scale, None, args, backend=backend, errors=errors)
            results.append((stored, errors))
        assert_close(results[0][0], results[1][0], rtol=0, atol=0)
        assert_close(results[0][1], results[1][1], rtol=1e-12, atol=0)


def test_groups_that_are_no_power_of_two_and_strided_weights() -> None:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=48)
    x = weight(torch.bfloat16, 5, 96)
    scale, _ = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)(x)
    expected = quantize_and_pack(x, scale, None, args, backend="reference")
    for each in (x, x.t().contiguous().t()):
        got = quantize_and_pack(each, scale, None, args, backend="triton")
        assert_close(got, expected, rtol=0, atol=0)


def test_ties_go_to_the_even_code() -> None:
    """Values in the middle of two codes, and beyond the last."""
    for num_bits, kind in ((4, "int"), (4, "float"), (8, "float")):
        args = QuantizationArgs(num_bits=num_bits, type=kind, strategy="channel")
        x = torch.arange(-9, 9.25, 0.25).repeat(2, 1)[:, :72]
        scale = torch.tensor([[1.0], [-1.0 if kind == "int" else 0.5]])
        both = [
            quantize_and_pack(x, scale, None, args, packed=False, backend=b)
            for b in ("triton", "reference")
        ]
        assert_close(raw(both[0]), raw(both[1]), rtol=0, atol=0)
