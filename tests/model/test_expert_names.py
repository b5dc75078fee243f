"""Names and shapes of experts, as vLLM's weight loaders expect them.

The facts are those of vLLM 0.32: `benchmarks/expert_loading.py` lets its own classes load the
checkpoints. This holds what is written against them without vLLM.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import EXPERT_FAMILIES, saved
from families import read
from model_matrix import matrix_model

from steelyard import oneshot
from steelyard.modifiers import QuantizationModifier

GATED = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")
VLLM_READS: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2_moe": ("model.layers.N.mlp.experts", GATED),
    "qwen3_moe": ("model.layers.N.mlp.experts", GATED),
    "mixtral": ("model.layers.N.block_sparse_moe.experts", NUMBERED),
    "olmoe": ("model.layers.N.mlp.experts", GATED),
    "deepseek_v3": ("model.layers.N.mlp.experts", GATED),
    "glm4_moe": ("model.layers.N.mlp.experts", GATED),
    "granitemoe": ("model.layers.N.block_sparse_moe.experts", GATED),
    "llama4_text": ("model.layers.N.feed_forward.experts", GATED),
    "minimax_m2": ("model.layers.N.block_sparse_moe.experts", NUMBERED),
    "ernie4_5_moe": ("model.layers.N.mlp.experts", GATED),
    "qwen3_next": ("model.layers.N.mlp.experts", GATED),
    "jamba": ("model.layers.N.feed_forward.experts", GATED),
    "granitemoehybrid": ("model.layers.N.block_sparse_moe.experts", GATED),
    "qwen3_vl_moe": ("model.language_model.layers.N.mlp.experts", GATED),
    "nemotron_h": ("backbone.layers.N.mixer.experts", ("up_proj", "down_proj")),
}
"""Of each family: where its experts are, and the names of gate, up and down."""

# Of one expert's Linear [out, in], as the parameters that vLLM registers for compressed-tensors.
SHAPES: dict[str, dict[str, tuple[str, torch.dtype]]] = {
    "W4A16": {
        "weight_packed": ("out, in / 8", torch.int32),
        "weight_scale": ("out, in / 32", torch.bfloat16),
        "weight_shape": ("2", torch.int64),
    },
    "W8A8": {
        "weight": ("out, in", torch.int8),
        "weight_scale": ("out, 1", torch.bfloat16),
    },
    "FP8_DYNAMIC": {
        "weight": ("out, in", torch.float8_e4m3fn),
        "weight_scale": ("out, 1", torch.bfloat16),
    },
    "FP8": {
        "weight": ("out, in", torch.float8_e4m3fn),
        "weight_scale": ("1", torch.bfloat16),
        "input_scale": ("1", torch.bfloat16),
    },
    "NVFP4A16": {
        "weight_packed": ("out, in / 2", torch.uint8),
        "weight_scale": ("out, in / 16", torch.float8_e4m3fn),
        "weight_global_scale": ("1", torch.float32),
    },
    "NVFP4": {
        "weight_packed": ("out, in / 2", torch.uint8),
        "weight_scale": ("out, in / 16", torch.float8_e4m3fn),
        "weight_global_scale": ("1", torch.float32),
        "input_global_scale": ("1", torch.float32),
    },
}


def made(family: str, folder: Path) -> Path:
    if family in EXPERT_FAMILIES:
        return saved(family, folder)
    matrix_model(family).save_pretrained(folder)
    return folder


def recipe(scheme: str, *ignore: str) -> QuantizationModifier:
    options: dict[str, Any] = {"group_size": 32} if scheme == "W4A16" else {}
    return QuantizationModifier(scheme=scheme, ignore=["lm_head", *ignore], **options)


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 100, (16,), generator=generator) for _ in range(4)]


def test_no_family_is_left_out() -> None:
    assert set(EXPERT_FAMILIES) - set(VLLM_READS) == {"gpt_oss"}, "which the plan refuses"


@pytest.mark.parametrize("family", VLLM_READS)
def test_experts_have_the_names_that_vllm_reads(family: str, tmp_path: Path) -> None:
    folder = made(family, tmp_path / "m")
    ignore = ["re:.*dt_proj"] if family == "jamba" else []
    oneshot(folder, recipe("W4A16", *ignore), None, tmp_path / "q", show_progress=False)
    parent, leaves = VLLM_READS[family]
    found: dict[str, set[str]] = {}
    for name in read(tmp_path / "q"):
        if (match := re.fullmatch(r"(.*\.experts)\.(\d+)\.([^.]+)\.\w+", name)) is not None:
            layer = re.sub(r"\.layers\.\d+\.", ".layers.N.", match[1])
            found.setdefault(layer, set()).add(f"{match[2]}.{match[3]}")
        else:
            assert ".experts." not in name, name
    assert found == {parent: {f"{n}.{leaf}" for n in range(4) for leaf in leaves}}


@pytest.mark.parametrize("scheme", SHAPES)
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "llama4_text"])
def test_experts_have_the_shapes_that_vllm_registers(
    family: str, scheme: str, tmp_path: Path
) -> None:
    """One stored by one, one stacked as (out, in), one stacked as (in, out)."""
    folder = saved(family, tmp_path / "m")
    data = tokens() if scheme in ("FP8", "NVFP4") else None
    oneshot(folder, recipe(scheme), data, tmp_path / "q", show_progress=False)
    parent, leaves = VLLM_READS[family]
    stored = read(tmp_path / "q")
    for leaf, (rows, columns) in zip(leaves, [(32, 64), (32, 64), (64, 32)], strict=True):
        prefix = f"{parent.replace('.N.', '.1.')}.3.{leaf}."
        found = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
        expected = {
            name: (_shape(text, rows, columns), dtype)
            for name, (text, dtype) in SHAPES[scheme].items()
        }
        assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == expected, prefix


def _shape(text: str, rows: int, columns: int) -> tuple[int, ...]:
    """
    >>> _shape("out, in / 8", 32, 64)
    (32, 8)
    """
    sizes = {"out": rows, "in": columns}
    found = []
    for part in text.split(", "):
        size, _, divisor = part.partition(" / ")
        found.append((sizes.get(size) or int(size)) // int(divisor or 1))
    return tuple(found)
