"""What the class of transformers says, held against what transformers really loads."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import EXPERTS, OTHERS, SIGHT, other_model, read, small_model, token_batches
from transformers import AutoConfig

from steelyard import oneshot
from steelyard.checkpoint import CheckpointView
from steelyard.errors import PlanError
from steelyard.model import class_loading, model_class
from steelyard.model.class_loading import ONLY_TRANSFORMERS, loading_problems
from steelyard.model.file_modules import FilesModel
from steelyard.model.model_class import stated_layers
from steelyard.modifiers import QuantizationModifier

GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"scheme": "FP8_DYNAMIC"},
    "int8": {"scheme": "W8A8"},
    "nvfp4": {"scheme": "NVFP4A16"},
    "int4": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUPS}}},
    "int4 asymmetric": {
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**GROUPS, "symmetric": False}}
        }
    },
    "blocks": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": BLOCKS}}},
}
JOINING = ("qwen3_moe", "minimax", "ernie4_5_moe")
CASES = [(family, scheme) for family in OTHERS for scheme in ("fp8", "int4")]
CASES += [("qwen3_moe", scheme) for scheme in ("int8", "nvfp4", "int4 asymmetric", "blocks")]
CASES += [(family, "nvfp4") for family in ("minimax", "ernie4_5_moe", "llava", "gemma3_vision")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def saved(family: str, folders: dict[str, Path], tmp_path: Path) -> Path:
    if family not in folders:
        folders[family] = tmp_path / "m"
        other_model(family).save_pretrained(folders[family])
    return folders[family]


@torch.no_grad()
def logits(model: Any, family: str) -> torch.Tensor:
    tokens = token_batches(9)[0][:, :12]
    inputs = {"input_ids": tokens}
    if family == "whisper":
        generator = torch.Generator().manual_seed(0)
        sound = torch.randn(2, 16, 64, generator=generator).bfloat16()
        inputs = {"input_features": sound, "decoder_input_ids": tokens}
    elif family in ("bart", "t5"):
        inputs["decoder_input_ids"] = tokens
    return torch.as_tensor(model(**inputs).logits.float().flatten())


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_what_the_plan_says_is_what_transformers_loads(
    family: str, scheme: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Either it loads whole and gives the model's logits, or the plan told that it does not."""
    source = saved(family, folders, tmp_path)
    recipe = QuantizationModifier(ignore=["lm_head"], **SCHEMES[scheme])
    told: list[str] = []
    try:
        result = oneshot(source, recipe, None, tmp_path / "q")
        told = [w for w in result.plan.warnings if w.startswith("transformers")]
    except PlanError as error:
        assert "cannot load packed weights" in str(error)
        assert family in ONLY_TRANSFORMERS and scheme == "int4"
        return
    said = result.plan.warnings
    assert not [w for w in said if "names alone" in w or "files do not hold" in w]
    plain = other_model(family)
    try:
        loaded, report = type(plain).from_pretrained(
            tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True
        )
    except (AttributeError, RuntimeError, ValueError):
        assert told
        return
    problems = {key: value for key, value in report.items() if value}
    assert bool(problems) == bool(told), (problems, told)
    if not told and family != "xlnet":  # whose positions are fp32, which bf16 layers do not take
        cosine = torch.cosine_similarity(logits(loaded, family), logits(plain, family), dim=0)
        assert float(cosine) > 0.85


def test_packed_weights_of_the_classes_named_in_the_issue_are_told(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for family in ("mamba2", "falcon", "gemma3_vision"):
        source = saved(family, folders, tmp_path / family)
        recipe = QuantizationModifier(ignore=["lm_head"], **SCHEMES["int4"])
        plan = oneshot(source, recipe, None, dry_run=True).plan
        assert any("cannot load packed weights" in w for w in plan.warnings), family


def test_what_nothing_loads_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    for family in ("rwkv", "t5"):
        source = saved(family, folders, tmp_path / family)
        recipe = QuantizationModifier(ignore=["lm_head"], **SCHEMES["int4"])
        plan = oneshot(source, recipe, None, dry_run=True).plan
        assert any("vLLM does not list this model" in error for error in plan.errors), family


def test_experts_left_beside_packed_layers_are_told(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """As GPTQ leaves them, which quantizes no joined experts."""
    for family in JOINING:
        source = saved(family, folders, tmp_path / family)
        recipe = QuantizationModifier(ignore=["lm_head", "re:.*experts.*"], **SCHEMES["int4"])
        plan = oneshot(source, recipe, None, dry_run=True).plan
        assert any("does not load experts" in w for w in plan.warnings), family


def test_layers_that_are_joined_in_a_matrix_are_told_if_they_become_a_stack(tmp_path: Path) -> None:
    name = "MiniMaxM3SparseForConditionalGeneration"
    text = {**EXPERTS, "num_local_experts": 4, "intermediate_size": 64}
    config = transformers.MiniMaxM3VLConfig(text_config=text, vision_config=SIGHT)
    model = getattr(transformers, name)(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    recipe = QuantizationModifier(scheme="FP8_DYNAMIC")
    result = oneshot(tmp_path / "m", recipe, None, tmp_path / "q")
    told = any("does not load experts as they are stored" in w for w in result.plan.warnings)
    loaded = type(model).from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    joined = [p for n, p in loaded.named_parameters() if "shared_experts.gate_up_proj" in n]
    assert joined and told == any(parameter.ndim != 2 for parameter in joined)
    recipe = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["re:.*shared_experts", "lm_head"])
    plan = oneshot(tmp_path / "m", recipe, None, dry_run=True).plan
    assert not [w for w in plan.warnings if w.startswith("transformers")]


# -- heads and tied weights ---------------------------------------------------------------------

TIED = {
    "bert": ("cls.predictions.decoder", "bert.embeddings.word_embeddings"),
    "modernbert": ("decoder", "model.embeddings.tok_embeddings"),
    "whisper": ("proj_out", "model.decoder.embed_tokens"),
    "bart": ("lm_head", "model.shared"),
    "t5": ("lm_head", "shared"),
    "xlnet": ("lm_loss", "transformer.word_embedding"),
}


@pytest.mark.parametrize("family", TIED)
def test_a_tied_embedding_is_no_target(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    head, embedding = TIED[family]
    source = saved(family, folders, tmp_path)
    recipe = QuantizationModifier(scheme="FP8_DYNAMIC", targets=["Linear", embedding])
    errors = oneshot(source, recipe, None, dry_run=True).plan.errors
    assert any(f"{embedding} shares its weight with" in error for error in errors), errors
    oneshot(source, QuantizationModifier(scheme="FP8_DYNAMIC"), None, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert head in config["quantization_config"]["ignore"]


def test_a_stored_tied_head_is_untied(tmp_path: Path) -> None:
    """Some checkpoints hold the head although it is the embedding; class defaults tie too."""
    model = small_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    recipe = QuantizationModifier(scheme="FP8_DYNAMIC")
    plan = oneshot(tmp_path / "m", recipe, None, dry_run=True).plan
    assert not plan.errors and plan.untied == {"lm_head": "model.embed_tokens"}
    ignoring = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["re:.*mlp.*", "lm_head"])
    plan = oneshot(tmp_path / "m", ignoring, None, dry_run=True).plan
    assert not plan.errors and not plan.untied


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("llava", "language_model.lm_head"),
        ("mllama", "language_model.lm_head"),
        ("gpt_neox", "embed_out"),
        ("rwkv", "head"),
    ],
)
def test_lm_head_in_ignore_is_the_head_whatever_its_name(
    family: str, stored: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = saved(family, folders, tmp_path)
    for options, quantized in (
        ({"ignore": ["lm_head"]}, False),
        ({"ignore": []}, True),
        ({"ignore": ["lm_head"], "targets": ["Linear", stored]}, True),
    ):
        recipe = QuantizationModifier(scheme="FP8_DYNAMIC", **options)
        plan = oneshot(source, recipe, None, dry_run=True).plan
        names = [planned.name for planned in plan.quantized]
        assert (stored in names) == quantized, options
        assert not [w for w in plan.warnings if w.startswith("transformers")]


# -- what is no Linear --------------------------------------------------------------------------


def test_classes_decide_and_not_names(folders: dict[str, Path], tmp_path: Path) -> None:
    bart = FilesModel(CheckpointView(saved("bart", folders, tmp_path / "bart")))
    assert type(bart.get_submodule("model.shared")).__name__ == "Embedding"
    neox = FilesModel(CheckpointView(saved("gpt_neox", folders, tmp_path / "neox")))
    assert type(neox.get_submodule("embed_out")).__name__ == "Linear"
    gemma = FilesModel(CheckpointView(saved("gemma3_vision", folders, tmp_path / "gemma")))
    attention = gemma.get_submodule("vision_tower.head.attention.out_proj")
    assert type(attention).__name__ != "Linear"


def test_unknown_model_types_are_inferred_and_said_so(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "nobody"}))
    recipe = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"])
    result = oneshot(tmp_path / "m", recipe, None, tmp_path / "q")
    assert len(result.plan.quantized) == 21
    assert any("by their names alone" in w and "'nobody'" in w for w in result.plan.warnings)
    assert "model.layers.0.mlp.up_proj.weight_scale" in read(tmp_path / "q")


def test_written_ignores_leave_the_class_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    """Every Linear of the class is either quantized in the files or ignored in the config."""
    from compressed_tensors.utils.match import is_match

    source = saved("mllama", folders, tmp_path)
    recipe = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*vision.*"])
    oneshot(source, recipe, None, tmp_path / "q")
    config = AutoConfig.from_pretrained(tmp_path / "q")
    ignore = config.quantization_config["ignore"]
    for name, module in other_model("mllama").named_modules():
        if isinstance(module, torch.nn.Linear) and "vision" in name:
            assert is_match(name, module, ignore), name


# -- numbers that do not belong to the files ----------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"head_dim": 3}, {"head_dim": 10**7}, {"hidden_size": 48}, {"hidden_size": 10**12}]
)
def test_sizes_that_are_not_those_of_the_files_are_told(
    changes: dict[str, int], tmp_path: Path
) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    recipe = QuantizationModifier(ignore=["lm_head"], **SCHEMES["int4"])
    oneshot(tmp_path / "m", recipe, None, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    specs = {name: (t.dtype, tuple(t.shape)) for name, t in read(tmp_path / "q").items()}
    assert not loading_problems(config, specs)
    problems = loading_problems({**config, **changes}, specs)
    assert problems and all("not of one model" in each for each in problems)


class Late(BaseException):
    """Nothing that builds a model catches it."""


@pytest.fixture
def in_a_minute() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_a_minute")
@pytest.mark.parametrize(
    ("kind", "name", "key"),
    [
        ("llama4_text", "Llama4ForCausalLM", "num_local_experts"),
        ("switch_transformers", "SwitchTransformersForConditionalGeneration", "num_experts"),
    ],
)
def test_a_model_of_a_billion_modules_is_not_built(
    kind: str, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (model_class, class_loading):
        monkeypatch.setattr(module, "MOST_PARAMETERS", 5_000)  # sooner, by as much
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    content = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": scheme},
    }
    config = {"model_type": kind, "architectures": [name], key: 10**9, "num_hidden_layers": 2}
    loading_problems({**config, "hidden_size": 64, "quantization_config": content}, {})


def test_layers_are_found_in_parts_of_parts() -> None:
    assert stated_layers({"a": {"b": {"num_layers": 7}}, "num_hidden_layers": 2}) == 7
