"""Small random mixtures of experts, one of each form that transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_ROUTED = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4_moe": _ROUTED,
    "granitemoe": {"num_local_experts": 4},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64,
    },
    "minimax_m2": {"num_local_experts": 4},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 32, **_LINEAR},
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "granitemoehybrid": {
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "gpt_oss": {"num_local_experts": 4},
}
"""Options of each config class: stacked in both orientations, with and without bias, one after the
other or in turns, scaled at the output or at the input, beside attention or a state space."""


def expert_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a small model, with weights that make its layers count."""
    options = {**_COMMON, **EXPERT_FAMILIES[family], **changes}
    config = AutoConfig.for_model(family, **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    if dtype == torch.float64:  # which the other ways to multiply do not have
        model.config._experts_implementation = "eager"
    return model.eval()


def saved(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write such a model, and return its folder."""
    expert_model(family, dtype, **changes).save_pretrained(folder)
    return folder
