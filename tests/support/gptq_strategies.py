"""Problems for GPTQ that Hypothesis makes, and the formats to try them in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gptq_problems import FORMATS
from hypothesis import strategies as st

ROWS, COLUMNS = 6, 32
NAMES = [
    "int2_group",
    "int3_asym_group",
    "int4_group",
    "int4_asym_channel",
    "int4_tensor",
    "int8_channel",
    "int8_asym_block",
    "fp8_block",
    "fp8_channel",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8A16",
]
every_format = pytest.mark.parametrize("args", [FORMATS[n] for n in NAMES], ids=NAMES)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Weights and inputs: correlated or not, fewer tokens than columns, of all sizes, dead ones."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    weight *= draw(st.sampled_from([1e-3, 0.05, 1.0, 100.0]))
    if draw(st.booleans()):  # an outlier, zeros, and a row of the same number
        weight[0, 3] *= 50
        weight[1, :20] = 0
        weight[2] = weight[2, 0]
    tokens = draw(st.sampled_from([1, 3, COLUMNS // 2, COLUMNS, 4 * COLUMNS]))
    x = torch.randn(tokens, COLUMNS, generator=generator)
    rank = draw(st.sampled_from([0, 1, 5]))
    if rank:
        x *= draw(st.sampled_from([0.0, 1e-3, 0.3]))
        shared = torch.randn(tokens, rank, generator=generator)
        x += shared @ torch.randn(rank, COLUMNS, generator=generator)
    if draw(st.booleans()):  # columns of very different sizes
        x *= torch.logspace(-3, 3, COLUMNS)[torch.randperm(COLUMNS, generator=generator)]
    x[:, : draw(st.sampled_from([0, 1, 10, COLUMNS]))] = 0
    x *= draw(st.sampled_from([1e-15, 1.0, 1e12]))
    return {
        "weight": weight.to(dtype),
        "hessian": x.t() @ x,
        "dampening_frac": draw(st.sampled_from([0.0, 1e-4, 0.01, 1.0, 50.0])),
        "ordered": draw(st.booleans()),
        "backend": draw(st.sampled_from(["reference", "compiled"])),
        "block_size": draw(st.sampled_from([1, 8, 128])),
    }
