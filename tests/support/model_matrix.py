"""Small random models of the families that people serve, and samples that each takes.

Every model has two to four layers of width 64, from transformers' own classes, so that each family
runs in a few seconds. Samples are mappings of what the model's forward takes: token ids, and images
or audio where it has a tower for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from families import EXPERTS, OTHERS, SIGHT, TWO

Sample = dict[str, torch.Tensor]

IMAGE, VIDEO, START, END = 120, 121, 122, 123  # token ids
ROWS = 4  # samples


@dataclass(frozen=True)
class Family:
    """One family.

    kind:   dense | experts | hybrid | vision | audio | encoder
    name:   of the class, and of its config
    sample: returns a sample, given its number
    ignore: modules that a recipe has to ignore
    """

    kind: str
    name: str
    config: str
    options: dict[str, Any]
    sample: Callable[[int], Sample]
    ignore: tuple[str, ...] = ()


def tokens(seed: int, length: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 118, (1, length), generator=generator)


def text(seed: int) -> Sample:
    return {"input_ids": tokens(seed)}


def pixels(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_image(seed: int, count: int, **more: torch.Tensor) -> Sample:
    """Return text around `count` image tokens."""
    row = tokens(seed)
    image = torch.full((1, count), IMAGE)
    ids = torch.cat([row[:, :4], torch.tensor([[START]]), image, torch.tensor([[END]]), row], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def clip_image(seed: int) -> Sample:
    return with_image(seed, 4, pixel_values=pixels(seed, 1, 3, 28, 28))


def gemma3_image(seed: int) -> Sample:
    sample = clip_image(seed)
    return {**sample, "token_type_ids": (sample["input_ids"] == IMAGE).long()}


def grid_image(channels: int, patch: int) -> Callable[[int], Sample]:
    """Images of Qwen-VL: 4 x 4 patches, merged two by two."""

    def sample(seed: int) -> Sample:
        patches = pixels(seed, 16, channels * 2 * patch * patch)
        grid = torch.tensor([[1, 4, 4]])
        made = with_image(seed, 4, pixel_values=patches, image_grid_thw=grid)
        return {**made, "mm_token_type_ids": (made["input_ids"] == IMAGE).long()}

    return sample


def pixtral_image(seed: int) -> Sample:
    sizes = torch.tensor([[56, 56]])
    return with_image(seed, 4, pixel_values=pixels(seed, 1, 3, 56, 56), image_sizes=sizes)


def mllama_image(seed: int) -> Sample:
    row = tokens(seed)
    ids = torch.cat([torch.tensor([[IMAGE]]), row], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels(seed, 1, 1, 1, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 1, dtype=torch.long),
    }


def idefics_image(seed: int) -> Sample:
    return with_image(seed, 1, pixel_values=pixels(seed, 1, 1, 3, 28, 28))


def internvl_image(seed: int) -> Sample:
    return with_image(seed, 1, pixel_values=pixels(seed, 1, 3, 28, 28))


def whisper_audio(seed: int) -> Sample:
    return {"input_features": pixels(seed, 1, 16, 64), "decoder_input_ids": tokens(seed, 12)}


def qwen2_audio(seed: int) -> Sample:
    made = with_image(seed, 16, input_features=pixels(seed, 1, 16, 64))
    return {**made, "feature_attention_mask": torch.ones(1, 64, dtype=torch.long)}


def both_sides(seed: int) -> Sample:
    return {"input_ids": tokens(seed), "decoder_input_ids": tokens(seed + 100, 12)}


HEADS = {**TWO, "head_dim": 16}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "layer_types": ["mamba", "attention"],
}
QWEN_SIGHT = {
    "depth": 2,
    "embed_dim": 64,
    "hidden_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
QWEN3_SIGHT = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def known(kind: str, family: str, sample: Callable[[int], Sample] = text) -> Family:
    return Family(kind, *OTHERS[family], sample)


def decoder(kind: str, stem: str, **options: Any) -> Family:
    return Family(kind, f"{stem}ForCausalLM", f"{stem}Config", options, text)


MATRIX: dict[str, Family] = {
    "llama": decoder("dense", "Llama", **TWO),
    "qwen2": decoder("dense", "Qwen2", **TWO),
    "qwen3": decoder("dense", "Qwen3", **HEADS),
    "gemma2": decoder("dense", "Gemma2", **HEADS, sliding_window=8),
    "gemma3": Family("dense", "Gemma3ForCausalLM", "Gemma3TextConfig", HEADS, text),
    "phi3": decoder("dense", "Phi3", **TWO),
    "mistral": decoder("dense", "Mistral", **TWO, sliding_window=8),
    "gpt2": Family(
        "dense",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 128,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        text,
    ),
    "opt": decoder(
        "dense",
        "OPT",
        vocab_size=128,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "qwen2_moe": decoder(
        "experts", "Qwen2Moe", **EXPERTS, num_experts=4, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": decoder("experts", "Qwen3Moe", **EXPERTS, num_experts=4),
    "mixtral": decoder("experts", "Mixtral", **TWO, **LOCAL),
    "olmoe": decoder("experts", "Olmoe", **TWO, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": decoder("experts", "DeepseekV3", **{**TWO, **LATENT, **ROUTED}),
    "glm4_moe": decoder("experts", "Glm4Moe", **{**HEADS, **ROUTED}),
    "granitemoe": decoder("experts", "GraniteMoe", **TWO, **LOCAL),
    "llama4": known("experts", "llama4"),
    "minimax_m2": decoder("experts", "MiniMaxM2", **HEADS, **LOCAL),
    "gpt_oss": decoder("experts", "GptOss", **HEADS, **LOCAL, sliding_window=8),
    "ernie4_5_moe": known("experts", "ernie4_5_moe"),
    "qwen3_next": decoder(
        "hybrid",
        "Qwen3Next",
        **EXPERTS,
        **DELTA,
        num_experts=4,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_5": Family(
        "hybrid", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**HEADS, **DELTA}, text
    ),
    "nemotron_h": decoder(
        "hybrid",
        "NemotronH",
        **HEADS,
        layers_block_type=["mamba", "attention", "moe", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        n_group=1,
        topk_group=1,
    ),
    "granitemoehybrid": decoder(
        "hybrid", "GraniteMoeHybrid", **TWO, **LOCAL, **MAMBA, shared_intermediate_size=64
    ),
    "jamba": Family(
        "hybrid",
        "JambaForCausalLM",
        "JambaConfig",
        {
            **TWO,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
        text,
        ignore=("re:.*dt_proj",),  # whose weight is read without a call
    ),
    "llava": known("vision", "llava", clip_image),
    "qwen2_vl": Family(
        "vision",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**TWO, "rope_parameters": SECTIONS},
            "vision_config": QWEN_SIGHT,
            **QWEN_TOKENS,
        },
        grid_image(3, 14),
    ),
    "qwen2_5_vl": Family(
        "vision",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**TWO, "rope_parameters": SECTIONS},
            "vision_config": {
                **QWEN_SIGHT,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
            **QWEN_TOKENS,
        },
        grid_image(3, 14),
    ),
    "qwen3_vl": Family(
        "vision",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {**HEADS, "rope_parameters": SECTIONS},
            "vision_config": QWEN3_SIGHT,
            **QWEN_TOKENS,
        },
        grid_image(3, 14),
    ),
    "qwen3_vl_moe": Family(
        "vision",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            "text_config": {**EXPERTS, "num_experts": 4, "rope_parameters": SECTIONS},
            "vision_config": QWEN3_SIGHT,
            **QWEN_TOKENS,
        },
        grid_image(3, 14),
    ),
    "gemma3_vision": known("vision", "gemma3_vision", gemma3_image),
    "mistral3": Family(
        "vision",
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**TWO, "model_type": "mistral"},
            "vision_config": {**SIGHT, "model_type": "pixtral", "head_dim": 32, "image_size": 56},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
        },
        pixtral_image,
    ),
    "mllama": known("vision", "mllama", mllama_image),
    "idefics3": Family(
        "vision",
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {
            "text_config": {**TWO, "model_type": "llama"},
            "vision_config": SIGHT,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        idefics_image,
    ),
    "internvl": Family(
        "vision",
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {
            "text_config": {**TWO, "model_type": "qwen2"},
            "vision_config": {**SIGHT, "image_size": [28, 28], "patch_size": [14, 14]},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
        internvl_image,
    ),
    "whisper": known("audio", "whisper", whisper_audio),
    "qwen2_audio": Family(
        "audio",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2AudioConfig",
        {
            "text_config": {**TWO, "model_type": "qwen2"},
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "d_model": 64,
                "max_source_positions": 32,
            },
            "audio_token_index": IMAGE,
        },
        qwen2_audio,
    ),
    "bert": known("encoder", "bert"),
    "t5": known("encoder", "t5", both_sides),
}


def matrix_model(family: str) -> Any:
    """Return the model of a family, in bf16; its weights are large enough to matter."""
    row = MATRIX[family]
    torch.manual_seed(0)
    config = getattr(transformers, row.config)(**row.options)
    model = getattr(transformers, row.name)(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data.mul_(3)
    return model.to(torch.bfloat16).eval()


def matrix_samples(family: str) -> list[Sample]:
    return [MATRIX[family].sample(seed) for seed in range(ROWS)]
