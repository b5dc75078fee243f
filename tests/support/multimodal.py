"""Small random models that take images, audio, or more than token ids; with inputs by hand."""

from __future__ import annotations

from typing import Any

import torch
import transformers

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EYES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE, VIDEO, START, END = 120, 121, 122, 123
MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TURNS = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
AUDIO = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "num_mel_bins": 16,
    "max_source_positions": 16,
}
ENCODER = {
    **AUDIO,
    "vocab_size": 128,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "max_target_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# family: class, its config class, options, and the kind of inputs
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**EYES, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
        },
        "pictures",
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**TEXT, "model_type": "mistral", "head_dim": 16},
            "vision_config": {**EYES, "model_type": "pixtral", "image_size": 56, "head_dim": 32},
            "image_token_index": IMAGE,
        },
        "sized pictures",
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": EYES,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
        },
        "pictures",
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 64,
                "num_heads": 2,
                "patch_size": 14,
            },
            **MARKS,
        },
        "patches",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "num_heads": 2,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            **MARKS,
        },
        "patches",
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 3,
                "head_dim": 16,
                "rope_parameters": ROPE,
            },
            "vision_config": {
                "depth": 3,
                "hidden_size": 64,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "num_heads": 2,
                "patch_size": 14,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            **MARKS,
        },
        "patches",
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {
            "text_config": {**TEXT, **TURNS},
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
                "patch_size": 14,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
            },
            **MARKS,
        },
        "patches",
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 3,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 128,
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
                "intermediate_layers_indices": [0],
            },
            "image_token_index": IMAGE,
        },
        "tiles",
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**EYES, "image_size": 56},
            "scale_factor": 2,
            "image_token_id": IMAGE,
        },
        "several pictures",
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**EYES, "image_size": [28, 28], "patch_size": [7, 7]},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
        "pictures",
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", ENCODER, "speech"),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        "Qwen2AudioConfig",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {**AUDIO, "model_type": "qwen2_audio_encoder"},
            "audio_token_index": IMAGE,
        },
        "sounds",
    ),
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
        "pairs",
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {k: v for k, v in TEXT.items() if k != "num_key_value_heads"},
        "tokens",
    ),
    "reranker": (
        "Qwen3ForSequenceClassification",
        "Qwen3Config",
        {**TEXT, "head_dim": 16, "num_labels": 1},
        "tokens",
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **TEXT,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        "tokens",
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **{k: v for k, v in TEXT.items() if k != "num_hidden_layers"},
            "layers_block_type": ["mamba", "attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "use_mamba_kernels": False,
        },
        "tokens",
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **TEXT,
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
        "tokens",
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**TEXT, **TURNS, "num_experts": 0, "mlp_only_layers": [0, 1]},
        "tokens",
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**TEXT, "head_dim": 16, "sliding_window": 4},
        "tokens",
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**TEXT, **LATENT, **EXPERTS, "n_shared_experts": 1},
        "tokens",
    ),
    "glm5": (
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {
            **TEXT,
            **LATENT,
            **EXPERTS,
            "index_topk": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
        "tokens",
    ),
}


def multimodal_model(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    name, config, options, _ = MODELS[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**options, **changes}))
    for parameter in model.parameters():  # the classes start from nearly nothing
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    return model.to(dtype).eval()


def samples_for_model(family: str, count: int = 3, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return samples as a processor would give them, each a batch of one."""
    generator = torch.Generator().manual_seed(seed)
    return [_sample(MODELS[family][3], 10 + 3 * i, generator) for i in range(count)]


def _sample(kind: str, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ids = torch.randint(3, 110, (1, length), generator=generator)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "tokens":
        return {"input_ids": ids}
    if kind == "pairs":
        return {"input_ids": ids, "labels": ids.flip(1)}
    if kind == "speech":
        return {"input_features": pixels(1, 16, 32), "labels": ids}
    ids[0, 2:6] = IMAGE
    if kind == "pictures":
        return {**text, "pixel_values": pixels(1, 3, 28, 28)}
    if kind == "sized pictures":
        return {
            **text,
            "pixel_values": pixels(1, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]]),
        }
    if kind == "several pictures":
        return {**text, "pixel_values": pixels(1, 1, 3, 56, 56)}
    if kind == "sounds":
        mask = torch.ones(1, 32, dtype=torch.int64)
        ids[0, 2:10] = IMAGE
        return {**text, "input_features": pixels(1, 16, 32), "feature_attention_mask": mask}
    if kind == "tiles":
        ids[0, 2:6] = 7
        ids[0, 1] = IMAGE
        cross = torch.ones(1, length, 1, 1, dtype=torch.int64)
        cross[:, :1] = 0
        return {
            **text,
            "pixel_values": pixels(1, 1, 1, 3, 28, 28),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
            "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.int64),
            "cross_attention_mask": cross,
        }
    assert kind == "patches"
    ids[0, 1], ids[0, 6] = START, END
    return {
        **text,
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels(16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
