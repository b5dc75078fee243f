"""The compiled search excludes scales by bounds: of all codes of both signs, none is better."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.kernels.optimal_search import optimal_qparams, scale_codes

SIZE = 96
KINDS = ["normal", "outliers", "few values", "on a grid", "one long side", "weights far apart"]


def groups_of(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and weights of three groups, each (1, 3, 1, SIZE)."""
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(3, SIZE, generator=generator) * torch.tensor([[0.003], [1.0], [30.0]])
    w = torch.rand(3, SIZE, generator=generator) + 0.1
    if kind == "outliers":
        x[:, ::17] *= 6
    elif kind == "few values":
        x[:, 7:] = 0
    elif kind == "on a grid":
        x = (x / x.abs().amax(1, keepdim=True) * 6).round() * torch.tensor([[0.25], [0.5], [3.0]])
    elif kind == "one long side":
        x = torch.where(x > 0, 1.4 * x, x)
    elif kind == "weights far apart":
        w = torch.exp(3 * torch.randn(3, SIZE, generator=generator))
        w[:, int(x[1].abs().argmax())] = 1e-4
        w[:, ::5] = 0
    return x.to(dtype).reshape(1, 3, 1, SIZE), w.reshape(1, 3, 1, SIZE)


def errors(x: np.ndarray, w: np.ndarray, bits: int, scales: np.ndarray, norm: float) -> np.ndarray:
    half = 2 ** (bits - 1)
    codes = np.rint(np.clip(x / scales[:, None], -half, half - 1))
    return (w * np.abs(codes * scales[:, None] - x) ** norm).sum(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [2.0, 3.0])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        (2, torch.bfloat16),
        (3, torch.bfloat16),
        (4, torch.bfloat16),
        (4, torch.float16),
        (6, torch.bfloat16),
    ],
)
def test_no_code_of_either_sign_is_better(
    isa: str, bits: int, dtype: torch.dtype, negative: bool, norm: float, kind: str
) -> None:
    args = QuantizationArgs(num_bits=bits, strategy="group", group_size=SIZE)
    x, w = groups_of(kind, dtype)
    weighed = kind in ("weights far apart", "outliers")
    scale, _ = optimal_qparams(
        x, args, dtype, w if weighed else None, negative_scales=negative, norm=norm
    )
    codes = scale_codes(dtype).numpy()
    for group in range(3):
        values = x[0, group, 0].double().numpy()
        weights = w[0, group, 0].double().numpy() if weighed else np.ones(SIZE)
        largest = np.abs(values).max()
        tried = codes[(codes > largest / 2000) & (codes < 3 * largest)]
        if negative:
            tried = np.concatenate([tried, -tried])
        best = errors(values, weights, bits, tried, norm).min()
        found = errors(values, weights, bits, np.array([float(scale[group, 0])]), norm)[0]
        # of each error, fp32 keeps some 1e-5, of which a power makes as many
        assert found <= best * (1 + 1e-5 * norm) + 1e-20
