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

TWO = {**COMMON, "num_hidden_layers": 2}
PLAIN = {key: value for key, value in TWO.items() if key != "num_key_value_heads"}
EYES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIGHT = {**EYES, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
SEQ2SEQ = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
EXPERTS = {**TWO, "head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Classes that tie, rename, join or hide what the files hold: class, config class, its options.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", PLAIN),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**PLAIN, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **SEQ2SEQ,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 128,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**TWO, "model_type": "llama"},
            "vision_config": {**SIGHT, "model_type": "clip_vision_model"},
            "image_token_index": 120,
        },
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        {
            "text_config": {
                **TWO,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": {
                **EYES,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 128,
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
                "intermediate_layers_indices": [0],
            },
            "image_token_index": 120,
        },
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": 128, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "attention_hidden_size": 64,
            "intermediate_size": 128,
            "context_length": 64,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "gemma3_vision": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**TWO, "head_dim": 16},
            "vision_config": SIGHT,
            "mm_tokens_per_image": 4,
            "image_token_index": 120,
            "boi_token_index": 121,
            "eoi_token_index": 122,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "num_experts": 4}),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**TWO, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    ),
    "granitemoe_swa": (  # its class holds experts stacked, and takes them no other way
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSWAConfig",
        {**TWO, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama4": (  # stacked, and a list of Linear layers where it is quantized
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **TWO,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 1,
        },
    ),
    "kimi_k25": (  # whose vision tower stores queries, keys and values as one
        "Kimi_K25ForConditionalGeneration",
        "Kimi_K25Config",
        {
            "text_config": {
                **TWO,
                "model_type": "deepseek_v3",
                "num_key_value_heads": 4,
                "moe_intermediate_size": 64,
                "n_shared_experts": 1,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 32,
                "q_lora_rank": 32,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 16,
            },
            "vision_config": {**EYES, "num_attention_heads": 4, "patch_size": 14},
            "projection_hidden_size": 64,
            "image_token_id": 120,
            "video_token_id": 121,
        },
    ),
    "hrm_text": (  # stores gate and up as one
        "HrmTextForCausalLM",
        "HrmTextConfig",
        {**TWO, "head_dim": 16},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            **TWO,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
}


def other_model(family: str, **changes: Any) -> Any:
    """Return a small model of one of `OTHERS`, in bf16."""
    name, config, options = OTHERS[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**options, **changes}))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    return model.to(torch.bfloat16).eval()


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


def assert_same_tensors(first: Path, second: Path) -> None:
    left, right = read(first), read(second)
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())[:6]
    for name, tensor in left.items():
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name
