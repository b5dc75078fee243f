"""What a plan says of a model before anything is done to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from families import small_model
from safetensors.torch import save_file

from steelyard.checkpoint import CheckpointView
from steelyard.entry import oneshot
from steelyard.errors import PlanError
from steelyard.model.file_modules import FilesModel
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, Modifier, QuantizationModifier
from steelyard.plan.plan import Plan, make_plan


def plan_of(model: Any, **options: Any) -> Plan:
    return make_plan(model, QuantizationModifier(**options).config)


def recipe_plan(model: Any, *before: Modifier, **options: Any) -> Plan:
    """Return the plan of a whole recipe, as a run makes it."""
    modifier = QuantizationModifier(**options)
    return make_plan(model, modifier.config, modifiers=[*before, modifier])


def weights(observer: str | None = None, **args: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "strategy": "group", "group_size": 16, "observer": observer, **args}
    return {
        "config_groups": {"g": {"targets": ["Linear"], "weights": given}},
        "ignore": ["lm_head"],
    }


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


@pytest.mark.parametrize("field", ["targets", "ignore"])
def test_expression_that_would_never_end(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr("steelyard.checkpoint.patterns.SECONDS", 0.3)
    with pytest.raises(PlanError, match=r"\(\.\+\)\+.* takes longer than"):
        recipe_plan(small_model("llama"), scheme="FP8_DYNAMIC", **{field: ["re:((.+)+)+!"]})


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
    """One sentence for all modules of a width, with sizes that divide every targeted module."""
    model = small_model("llama", hidden_size=96, intermediate_size=160)
    plan = plan_of(model, scheme="W4A16", ignore=["lm_head"])
    assert plan.errors == [
        "18 modules such as model.layers.0.self_attn.q_proj: 96 columns cannot be cut into weight "
        "groups of 128; use group_size=32 (or 16), which divides 96, 160, or ignore them",
        "3 modules such as model.layers.0.mlp.down_proj: 160 columns cannot be cut into weight "
        "groups of 128; use group_size=32 (or 16), which divides 96, 160, or ignore them",
    ]
    assert not plan_of(model, scheme="W4A16", group_size=32, ignore=["lm_head"]).errors
    with pytest.raises(PlanError, match="nothing was done"):
        plan.require()


def test_group_sizes_that_nothing_divides_or_a_format_fixes() -> None:
    odd = small_model("llama", hidden_size=72, intermediate_size=100)
    for scheme, remedy in (("W4A16", "strategy channel"), ("NVFP4A16", "the format fixes")):
        only(plan_of(odd, scheme=scheme, ignore=["lm_head"]).errors, "72 columns", remedy)


def test_block_that_does_not_divide() -> None:
    plan = plan_of(small_model("llama"), scheme="FP8_BLOCK", ignore=["lm_head"])
    assert len(plan.errors) == 2, "its inputs have groups of 128, too"
    only(plan.errors, "18 modules such as", "q_proj", "64 columns", "128 x 128")


def test_bypass_lets_blocks_pass_and_says_that_groups_cannot() -> None:
    blocks = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    options = weights(group_size=None, **blocks)
    only(recipe_plan(small_model("llama"), **options).errors, "set bypass_divisibility_checks")
    passed = recipe_plan(small_model("llama"), bypass_divisibility_checks=True, **options)
    assert passed.errors == []
    for scheme, kind in (("W4A16", "weight"), ("FP8_BLOCK", "input")):
        plan = recipe_plan(small_model("llama"), scheme=scheme, bypass_divisibility_checks=True)
        only(
            plan.errors,
            "q_proj",
            f"{kind} groups of 128",
            "bypass_divisibility_checks applies to blocks",
        )


def test_a_plan_with_errors_can_be_shown() -> None:
    text = str(plan_of(small_model("llama"), scheme="W4A16", ignore=["lm_head"]))
    assert "error: 18 modules such as model.layers.0.self_attn.q_proj: 64 columns" in text
    assert "->" not in text


def test_token_ids_are_not_quantized() -> None:
    for scheme in ("FP8", "W8A8"):
        plan = plan_of(small_model("llama"), scheme=scheme, targets=["Embedding"])
        only(plan.errors, "embed_tokens is an Embedding", "token ids", "without input_activations")
    assert plan_of(small_model("llama"), scheme="MXFP8A16", targets=["Embedding"]).errors == []


ATTENTION = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def attention(**scheme: Any) -> dict[str, Any]:
    return {"config_groups": {"a": {"targets": ["LlamaAttention"], **scheme}}}


def test_attention_alone() -> None:
    plan = plan_of(small_model("llama"), **attention(input_activations=ATTENTION))
    assert plan.errors == []
    assert plan.quantized == []
    assert plan.attention == [f"model.layers.{i}.self_attn" for i in range(3)]
    plan = plan_of(
        small_model("llama"),
        **attention(input_activations=ATTENTION),
        ignore=["re:.*layers.[01].self_attn$"],
    )
    assert plan.attention == ["model.layers.2.self_attn"]


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        ({"weights": ATTENTION}, "no weights of their own: target their projections"),
        ({"weights": ATTENTION, "input_activations": ATTENTION}, "no weights of their own"),
        ({"output_activations": ATTENTION}, "quantized by input_activations"),
        (
            {"input_activations": {"num_bits": 8, "strategy": "group", "group_size": 16}},
            "use tensor, attn_head",
        ),
    ],
)
def test_schemes_that_attention_cannot_have(scheme: Any, told: str) -> None:
    plan = plan_of(small_model("llama"), **attention(**scheme))
    only(plan.errors, "a targets 3 attention modules such as model.layers.0.self_attn", told)


def test_a_target_for_whole_layers_is_not_for_the_states_of_attention() -> None:
    plan = plan_of(
        small_model("llama"),
        scheme="FP8_DYNAMIC",
        targets=["re:model.layers.*"],
        kv_cache_scheme=ATTENTION,
    )
    assert plan.errors == []
    assert len(plan.quantized) == 21
    assert len(plan.attention) == 3


@pytest.mark.parametrize(
    ("family", "told"),
    [("opt", "num_key_value_heads"), ("gpt2", "GPT2LMHeadModel has no attention module")],
)
def test_models_whose_cache_cannot_be_quantized(family: str, told: str) -> None:
    plan = plan_of(small_model(family), kv_cache_scheme=ATTENTION)
    only(plan.errors, told, "kv_cache_scheme")
    assert all("\n" not in error for error in plan.errors)


def test_what_observers_would_refuse() -> None:
    model = small_model("llama")
    cache = {"num_bits": 8, "strategy": "group", "group_size": 16}
    only(plan_of(model, kv_cache_scheme=cache).errors, "kv_cache_scheme", "tensor, attn_head")
    plan = plan_of(model, **weights(type="float", symmetric=False))
    only(plan.errors, "weight of g", "set symmetric=True")


def test_target_that_matches_nothing() -> None:
    plan = plan_of(small_model("llama"), scheme={"FP8_DYNAMIC": ["Linear", "re:.*w1$"]})
    only(plan.errors, "re:.*w1$", "matches no module")


@pytest.mark.parametrize(
    ("ignore", "said"),
    [
        ("lm_haed", "'lm_haed' in ignore matches no module: did you mean 'lm_head'?, or remove it"),
        ("re:.*mlpp.*", "check its spelling, or remove it"),
        ("re:.*mlp.gat$", "check its spelling, or remove it"),
        ("model.layers.7.mlp", "did you mean 'model.layers.2.mlp'?"),
        ("lm_head", None),
        ("language_model.lm_head", None),
        ("re:.*lm_head", None),
        ("re:.*mlp.gate$", None),
        (r"re:.*mlp\.shared_expert_gate$", None),
        ("re:.*block_sparse_moe.gate", None),
        ("re:model.visual.*", None),
        (r"re:model\.vision_tower.*", None),
        ("re:.*multi_modal_projector.*", None),
    ],
)
def test_ignore_that_matches_nothing_is_an_error_unless_it_is_usual(
    ignore: str, said: str | None
) -> None:
    """Those that recipes carry from model to model are allowed."""
    tied = small_model("llama", tie_word_embeddings=True)
    for plan in (
        plan_of(tied, scheme="W8A8", ignore=["lm_head", ignore]),
        recipe_plan(tied, IMatrixGatherer(ignore=[ignore]), **weights("optimal")),
    ):
        if said is None:
            assert not any("ignore" in said for said in [*plan.errors, *plan.warnings])
        else:
            only(plan.errors, repr(ignore), said)


@pytest.mark.parametrize(
    "ignore",
    [
        "re:.*audio.*",
        "re:.*mm_projector.*",
        "re:.*q_a_proj$",
        "re:.*kv_a_proj_with_mqa$",
        r"re:.*gate_up_proj$",
        r"re:.*layers\.(56|57)\..*",
        "re:.*mtp.layers.*",
        "backbone.norm_f",
        r"model\.norm",  # almost the name of a module that is no Linear
    ],
)
def test_ignore_of_another_family_is_a_warning(ignore: str) -> None:
    """Scripts ignore parts that only some models of a family have; these resemble no name here."""
    for plan in (
        plan_of(small_model("llama"), scheme="W8A8", ignore=["lm_head", ignore]),
        recipe_plan(small_model("llama"), IMatrixGatherer(ignore=[ignore]), **weights("optimal")),
    ):
        assert not plan.errors
        only(plan.warnings, repr(ignore), "the model has no such module")


def test_target_of_a_gatherer_that_matches_nothing() -> None:
    plan = recipe_plan(
        small_model("llama"), IMatrixGatherer(targets=["Liner"]), **weights("optimal")
    )
    only(plan.errors, "'Liner' of IMatrixGatherer", "matches no module")


@pytest.mark.parametrize(
    ("observer", "gatherer", "useful"),
    [
        ("optimal", IMatrixGatherer(), True),
        ("imatrix_mse", IMatrixGatherer(targets=["re:.*q_proj"]), True),
        ("memoryless_mse", IMatrixGatherer(), False),
        ("memoryless_minmax", IMatrixGatherer(), False),
        (None, IMatrixGatherer(), True),  # the default uses importance
        ("optimal", IMatrixGatherer(targets=["lm_head"], ignore=[]), False),
        ("optimal", IMatrixGatherer(ignore=["Linear"]), False),
    ],
)
def test_gathering_for_nothing_is_warned_of(
    observer: str | None, gatherer: IMatrixGatherer, useful: bool
) -> None:
    plan = recipe_plan(small_model("llama"), gatherer, **weights(observer))
    assert plan.errors == []
    assert useful == (
        not any("IMatrixGatherer has no effect" in warning for warning in plan.warnings)
    )


STATIC = {"num_bits": 8, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scheme": "W8A8", "activation_observer": "mse"}, "activation_observer 'mse'.*dynamic"),
        ({"scheme": "W8A8", "input_observer": "mse"}, "input_observer 'mse' has no effect.*FP8"),
        ({"scheme": "W8A8", "observer": {"input": "mse"}}, "observer.input 'mse'.*dynamic"),
        ({"scheme": "MXFP8A16", "activation_observer": "mse"}, "does not quantize"),
        ({"scheme": "FP8", "output_observer": "mse"}, "output_observer 'mse'.*does not quantize"),
        ({"kv_cache_scheme": STATIC, "weight_observer": "mse"}, "weight_observer 'mse'"),
        ({"scheme": "FP8", "activation_observer": "mse"}, None),
        ({"scheme": "NVFP4", "activation_observer": "static_minmax"}, None),
        ({"scheme": "W8A8", "weight_observer": "mse"}, None),
        ({"scheme": "W8A8", "kv_cache_scheme": STATIC, "activation_observer": "mse"}, None),
    ],
)
def test_observers_that_observe_nothing_are_warned_of(
    options: dict[str, Any], told: str | None
) -> None:
    plan = recipe_plan(small_model("llama"), ignore=["lm_head"], **options)
    assert plan.errors == []
    idle = [warning for warning in plan.warnings if "has no effect" in warning]
    assert len(idle) == (told is not None)
    assert told is None or re.search(told, idle[0])


def test_tied_embeddings() -> None:
    model = small_model("llama", tie_word_embeddings=True)
    both = plan_of(model, scheme="W4A16", targets=["lm_head", "Embedding"], group_size=32)
    only(both.errors, "model.embed_tokens shares its weight with lm_head", "target lm_head instead")
    untied = plan_of(model, scheme="FP8_DYNAMIC")
    assert untied.errors == [] and untied.untied == {"lm_head": "model.embed_tokens"}
    kept = plan_of(model, scheme="FP8_DYNAMIC", ignore=["lm_head"])
    assert kept.errors == [] and kept.untied == {}


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


def test_layers_that_parallelism_cuts_alike_are_warned_of_once() -> None:
    plan = plan_of(
        small_model("llama", intermediate_size=100), **weights(strategy="channel", group_size=None)
    )
    kinds = [w.partition(":")[0] for w in plan.warnings if "tensor parallelism" in w]
    assert sorted(kinds) == ["down_proj", "gate_proj", "up_proj"]
    only(
        plan.warnings,
        "100 columns",
        "8 processes",
        "3 modules, such as model.layers.0.mlp.down_proj",
    )


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
    assert text.startswith("will quantize 21 modules\n")
    assert "will not quantize: lm_head (ignored by 'lm_head')" in text
    assert re.search(r"^size +[\d.]+ kB -> [\d.]+ kB$", text, re.MULTILINE)
    assert re.search(r"^memory +about [\d.]+ kB$", text, re.MULTILINE)
    assert re.search(r"^time +about 1 s$", text, re.MULTILINE)


def row_of(**options: Any) -> dict[str, str]:
    """Return the only row of the table in a plan, by the titles."""
    made = GPTQModifier if options.pop("gptq", False) else QuantizationModifier
    modifier = made(ignore=["lm_head"], **options)
    plan = make_plan(small_model("llama"), modifiers=[modifier])
    titles, row = (re.split(r" {2,}", line.strip()) for line in str(plan).split("\n")[1:3])
    return dict(zip(titles, row, strict=True))


def test_the_table_differs_as_recipes_do() -> None:
    weights = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group"}}
    weights["weights"] |= {"group_size": 32, "observer": "memoryless_minmax"}
    plain = row_of(config_groups={"small": weights})
    assert plain == {
        "group": "small",
        "modules": "21",
        "weights": "int4 group 32",
        "bits": plain["bits"],
        "observer": "memoryless_minmax",
        "algorithm": "nearest",
        "inputs": "not quantized",
        "stored as": "pack-quantized",
    }
    assert 4.5 < float(plain["bits"]) < 4.6, "a scale of 16 bits for 32 weights, and the shape"
    assert row_of(config_groups={"small": weights}, gptq=True)["algorithm"] == "gptq"
    dynamic, static = row_of(scheme="FP8_DYNAMIC"), row_of(scheme="FP8")
    assert (dynamic["weights"], dynamic["inputs"]) == ("fp8 channel", "fp8 token, dynamic")
    assert (static["weights"], static["inputs"]) == ("fp8 tensor", "fp8 tensor, token_mse")
    assert static["stored as"] == "float-quantized"


def test_tied_weight_is_counted_once() -> None:
    """Beside the bytes of the parameters, which torch counts once."""
    model = small_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plan = plan_of(model, scheme="FP8_DYNAMIC", ignore=["lm_head"])
    left = {item.name: item for item in plan.left}
    assert left["lm_head"].reason == "the weight of model.embed_tokens, which is stored once"
    names = {f"{planned.name}.weight" for planned in plan.quantized}
    kept = sum(p.nbytes for n, p in model.named_parameters() if n not in names)
    stored = sum(planned.stored_bytes for planned in plan.quantized)
    assert plan.output_bytes == kept + stored


@pytest.mark.parametrize(
    ("scheme", "ignore", "told"),
    [
        ("FP8_DYNAMIC", [], False),
        ("FP8_DYNAMIC", ["re:.*experts.*"], False),
        ("W8A8", [], True),
        ("W8A8", ["re:.*experts.*"], True),
    ],
)
def test_experts_that_transformers_does_not_find_again(
    scheme: str, ignore: list[str], told: bool, tmp_path: Path
) -> None:
    """As seen by loading them; int4 with packed words is found, see test_streaming."""
    small_model("qwen3_moe").save_pretrained(tmp_path / "m")
    recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head", *ignore])
    plan = oneshot(tmp_path / "m", recipe, None, dry_run=True).plan
    assert any("does not load experts" in w for w in plan.warnings) == told


def test_fused_layers_of_different_types_with_one_scale() -> None:
    model = small_model("llama")
    model.model.layers[1].self_attn.k_proj.float()
    plan = plan_of(model, scheme="FP8", ignore=["lm_head"])
    only(plan.errors, "layers.1.self_attn.q_proj", "bfloat16", "float32", "one type first")
    assert not plan_of(model, scheme="FP8_DYNAMIC", ignore=["lm_head"]).errors


def test_zero_points_of_few_rows(tmp_path: Path) -> None:
    """compressed-tensors itself cannot unpack them, as the test shows."""
    args = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    groups = {"g": {"targets": ["Linear"], "weights": args}}
    model = small_model("llama")
    model.lm_head = torch.nn.Linear(64, 3, bias=False)
    plan = plan_of(model, config_groups=groups)
    only(plan.errors, "lm_head", "zero points of 3 rows")
    words = pack_to_int32(torch.zeros(3, 2, dtype=torch.int8), 4, packed_dim=0)
    with pytest.raises(Exception):  # noqa: B017  # whatever it raises
        unpack_from_int32(words, 4, torch.Size([3, 2]), packed_dim=0)


def test_weights_without_elements(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(32, 0), "b.weight": torch.ones(32, 32)}
    plan = plan_of(files_model(tmp_path, tensors), scheme="FP8_DYNAMIC")
    only(plan.errors, "a has no weights", "(32, 0)", "ignore it")


def test_static_inputs_without_weights() -> None:
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "input_activations": inputs}
    plan = plan_of(small_model("llama"), config_groups={"mine": group}, ignore=["lm_head"])
    only(plan.errors, "'mine'", "static input scales", "add weights to it")


def test_a_source_that_holds_what_would_be_written(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(32, 128), "a.weight_packed": torch.ones(32, 16)}
    files_model(tmp_path, tensors)
    with pytest.raises(PlanError, match=r"a\.weight_packed is in .* already; pass the checkpoint"):
        oneshot(tmp_path, QuantizationModifier(scheme="W4A16"), output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def files_model(folder: Path, tensors: dict[str, torch.Tensor]) -> FilesModel:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return FilesModel(CheckpointView(folder))
