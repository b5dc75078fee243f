"""Small random models of many families, from transformers' own configuration classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen2_sliding": (
        "Qwen2Config",
        {**COMMON, "use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED},
    ),
    "qwen3": ("Qwen3Config", {**COMMON, "head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**COMMON, "head_dim": 16, "sliding_window": 8, "layer_types": MIXED},
    ),
    "mistral": ("MistralConfig", {**COMMON, "sliding_window": 8}),
    "phi3": ("Phi3Config", COMMON),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **COMMON,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 128,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        },
    ),
}
FAMILIES = list(CONFIGS)


def small_model(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    name, options = CONFIGS[family]
    config = getattr(transformers, name)(**{**options, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # the classes start from nearly nothing
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    return model.eval()


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, read by the library's own reader."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def token_batches(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 24), (1, 24), (3, 11)]
    return [torch.randint(3, 128, shape, generator=generator) for shape in shapes]
