"""Scales that are exactly as good: every instruction set and the reference choose the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.kernels.optimal_search import optimal_qparams

GROUPS, SIZE, BITS = 400, 6, 10
ARGS = QuantizationArgs(num_bits=4, strategy="group", group_size=SIZE)


def mirrored_groups() -> torch.Tensor:
    """Small integers, (1, GROUPS, 1, SIZE), that reach equally far to both sides."""
    x = torch.randint(-40, 41, (GROUPS, SIZE), generator=torch.Generator().manual_seed(1))
    x[:, 1] = -x[:, 0]
    return x.to(torch.bfloat16).reshape(1, GROUPS, 1, SIZE)


def scale_numerators() -> np.ndarray:
    """Every bf16 scale from 1 to 16, a multiple of 2^-7 and so of 2^-BITS, over 2^-BITS."""
    mantissas = np.arange(128, 256) << (BITS - 7)
    return np.unique(np.concatenate([mantissas << e for e in range(4)]))


def exact_errors(values: np.ndarray, numerators: np.ndarray, norm: int) -> np.ndarray:
    """The error of each scale in integers, so without rounding."""
    x = values.astype(np.int64) << BITS
    codes = np.rint(np.clip(x / numerators[:, None], -8, 7)).astype(np.int64)
    return (np.abs(codes * numerators[:, None] - x) ** norm).sum(1)


@pytest.mark.parametrize("norm", [2, 3])
def test_the_first_of_equal_scales_stays(isa: str, norm: int) -> None:
    x = mirrored_groups()
    found, reference = (
        optimal_qparams(
            x, ARGS, torch.bfloat16, negative_scales=True, norm=float(norm), backend=backend
        )[0]
        for backend in ("compiled", "reference")
    )
    torch.testing.assert_close(found, reference, rtol=0, atol=0)
    numerators = scale_numerators()
    both = np.concatenate([numerators, -numerators])
    ties = 0
    for group, scale in zip(x[0, :, 0].float().numpy(), found[:, 0].tolist(), strict=True):
        if abs(group).max() < 16 or not 1 < abs(scale) < 16:
            continue
        errors = exact_errors(group, both, norm)
        best = both[errors == errors.min()] / 2**BITS
        assert scale in best
        assert scale > 0 or (best < 0).all()
        ties += bool((best > 0).any() and (best < 0).any())
    assert ties > 100, "too few ties to test anything"
