"""What a plan says of a model before anything is done to it."""

from __future__ import annotations

from typing import Any

import pytest
from families import small_model

from steelyard.errors import PlanError
from steelyard.modifiers import QuantizationModifier
from steelyard.pipelines.plan import Plan, make_plan


def plan_of(model: Any, check: bool = True, **options: Any) -> Plan:
    return make_plan(model, QuantizationModifier(**options).config, check)


def only(problems: list[str], *parts: str) -> None:
    """Assert that one problem mentions all parts."""
    matching = [p for p in problems if all(part in p for part in parts)]
    assert matching, f"none of {problems} mentions {parts}"


def test_every_weight_is_quantized_or_listed_with_the_reason() -> None:
    model = small_model("llama")
    plan = plan_of(model, scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*layers.0.mlp.*"])
    left = {item.name: item.reason for item in plan.left}
    assert left["lm_head"] == "ignored by 'lm_head'"
    assert left["model.layers.0.mlp.up_proj"] == "ignored by 're:.*layers.0.mlp.*'"
    assert "Embedding" in left["model.embed_tokens"]
    matrices = {n.removesuffix(".weight") for n, p in model.named_parameters() if p.ndim > 1}
    assert {p.name for p in plan.quantized} | set(left) == matrices
    assert plan.errors == []
    plan.require()


def test_sizes_add_up() -> None:
    model = small_model("llama")
    plan = plan_of(model, scheme="FP8_DYNAMIC", ignore=["lm_head"])
    assert plan.source_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    kept = sum(item.nbytes for item in plan.left) + plan.small_bytes
    quantized = sum(p.shape[0] * p.shape[1] for p in plan.quantized)
    assert plan.source_bytes == kept + 2 * quantized
    scales = sum(2 * p.shape[0] for p in plan.quantized)
    assert plan.output_bytes == kept + quantized + scales


def test_group_size_that_does_not_divide() -> None:
    plan = plan_of(small_model("llama"), scheme="W4A16", ignore=["lm_head"])
    only(plan.errors, "layers.0.self_attn.q_proj", "64 columns", "groups of 128", "16, 32, 64")
    with pytest.raises(PlanError, match="nothing was done"):
        plan.require()
    fine = plan_of(small_model("llama"), False, scheme="W4A16", ignore=["lm_head"])
    assert fine.errors == []


def test_block_that_does_not_divide() -> None:
    plan = plan_of(small_model("llama"), scheme="FP8_BLOCK", ignore=["lm_head"])
    only(plan.errors, "q_proj", "64 columns", "128 x 128")


def test_target_that_matches_nothing() -> None:
    plan = plan_of(small_model("llama"), scheme={"FP8_DYNAMIC": ["Linear", "re:.*w1$"]})
    only(plan.errors, "re:.*w1$", "matches no module")
    only(plan_of(small_model("llama"), scheme="W8A8", ignore=["lm_haed"]).warnings, "lm_haed")


def test_tied_embeddings() -> None:
    model = small_model("llama", tie_word_embeddings=True)
    only(plan_of(model, scheme="FP8_DYNAMIC").errors, "lm_head", "embed_tokens", "ignore")
    assert plan_of(model, scheme="FP8_DYNAMIC", ignore=["lm_head"]).errors == []


def test_half_of_a_fused_layer() -> None:
    plan = plan_of(
        small_model("llama"), scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*layers.1.*k_proj"]
    )
    only(plan.errors, "layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj would not", "fuses")
    plan = plan_of(
        small_model("llama"),
        scheme={"FP8_DYNAMIC": ["re:.*[qv]_proj"], "W8A8": ["re:.*k_proj"]},
    )
    only(plan.errors, "k_proj", "different config groups")


@pytest.mark.parametrize(("size", "parallel"), [(96, "4"), (64, "8")])
def test_tensor_parallelism_is_warned_of(size: int, parallel: str) -> None:
    """down_proj is cut along its input: groups of 16 must stay whole on every process."""
    plan = plan_of(
        small_model("llama", intermediate_size=size),
        config_groups={
            "g": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": 16},
            }
        },
        ignore=["lm_head"],
    )
    assert plan.errors == []
    only(plan.warnings, "down_proj", f"{size} columns", f"over {parallel} processes", "16")


def test_stacked_experts_are_listed() -> None:
    model = small_model("qwen3_moe")
    plan = plan_of(model, scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*mlp.gate$"])
    stacked = [item for item in plan.left if len(item.shape) == 3]
    assert len(stacked) == 2 * model.config.num_hidden_layers
    assert all("3-D" in item.reason for item in stacked)
    assert "3-D" in str(plan)


def test_convolutions_that_are_linear_layers_are_listed() -> None:
    plan = plan_of(small_model("gpt2"), scheme="FP8_DYNAMIC", ignore=["lm_head"])
    only(plan.errors, "nothing would be quantized")
    assert any("Conv1D" in item.reason for item in plan.left)


def test_text_of_a_plan() -> None:
    plan = plan_of(small_model("llama"), scheme="FP8_DYNAMIC", ignore=["lm_head"])
    text = str(plan)
    assert "21 modules quantized" in text
    assert "float-quantized" in text
    assert "lm_head (ignored by 'lm_head')" in text
    assert "GB of memory" in text
