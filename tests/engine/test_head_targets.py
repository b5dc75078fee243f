"""Output heads and embeddings as targets, tied and untied."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import other_model, read, small_model, token_batches
from interruption import Stop, small_steps, stop_at_mark
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.checkpoint import CheckpointView
from steelyard.doctor import validate_folder
from steelyard.errors import DataError, PlanError
from steelyard.modifiers import GPTQModifier, QuantizationModifier

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
FP8 = {"targets": ["Embedding"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


def recipe(kind: str, *targets: str) -> Any:
    if kind == "gptq":
        return GPTQModifier(scheme="W4A16", group_size=32, targets=list(targets))
    options = {"group_size": 32} if kind == "W4A16" else {}
    return QuantizationModifier(scheme=kind, targets=list(targets), **options)


def data_for(kind: str) -> Any:
    return None if kind in ("W4A16", "FP8_DYNAMIC", "NVFP4A16") else token_batches()


def saved(folder: Path, tied: bool) -> Path:
    small_model("llama", tie_word_embeddings=tied).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(token_batches(7)[0]).logits
    return found


def settings(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def same_tensors(first: Path, second: Path) -> None:
    one, other = read(first), read(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        as_bytes = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, other[name])]
        assert_close(*as_bytes, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["Linear"], ["lm_head"], ["re:.*lm_head"]])
@pytest.mark.parametrize("kind", ["W4A16", "FP8", "gptq"])
def test_heads_from_folder_and_module(
    kind: str, targets: list[str], tied: bool, tmp_path: Path
) -> None:
    source, data = saved(tmp_path / "m", tied), data_for(kind)
    result = oneshot(source, recipe(kind, *targets), data, tmp_path / "folder")
    module = loaded(source)
    before = module.model.embed_tokens.weight
    values = before.detach().clone()
    oneshot(module, recipe(kind, *targets), data, tmp_path / "module")
    module.save_pretrained(tmp_path / "saved")
    same_tensors(tmp_path / "folder", tmp_path / "module")
    same_tensors(tmp_path / "folder", tmp_path / "saved")

    assert HEAD in result.modules
    assert module.model.embed_tokens.weight is before
    assert_close(before, values, rtol=0, atol=0)
    assert settings(tmp_path / "folder")["tie_word_embeddings"] is False
    assert settings(tmp_path / "module")["tie_word_embeddings"] is False
    original, written = read(source), read(tmp_path / "folder")
    assert_close(written[f"{EMBEDDING}.weight"], original[f"{EMBEDDING}.weight"], rtol=0, atol=0)
    assert result.plan.output_bytes == sum(t.nbytes for t in written.values())
    assert result.plan.source_bytes == sum(t.nbytes for t in original.values())

    found = validate_folder(tmp_path / "folder", source, full=True)
    assert (found.problems, found.notes) == ([], [])
    assert found.rows is not None and found.rows.modules == len(result.modules)
    again = loaded(tmp_path / "folder")
    assert_close(logits(again), logits(module), rtol=0, atol=0)


def test_untied_head_is_what_the_file_says(tmp_path: Path) -> None:
    """The codes are decoded here by hand, and put into the original model."""
    source = saved(tmp_path / "m", tied=True)
    oneshot(source, recipe("W4A16", "lm_head"), None, tmp_path / "q")
    stored = read(tmp_path / "q")
    packed, scale = stored["lm_head.weight_packed"], stored["lm_head.weight_scale"]
    codes = torch.stack([(packed >> 4 * place) & 15 for place in range(8)], dim=-1).flatten(1) - 8
    weight = codes.to(torch.bfloat16) * scale.repeat_interleave(32, 1)
    expected = copy.deepcopy(loaded(source))
    expected.lm_head.weight = torch.nn.Parameter(weight)
    assert_close(logits(loaded(tmp_path / "q")), logits(expected), rtol=0, atol=0)
    assert not torch.equal(logits(expected), logits(loaded(source)))


def test_gptq_of_a_tied_head_sees_the_final_norm(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", tied=True)
    oneshot(source, recipe("gptq", "lm_head"), token_batches(), tmp_path / "gptq")
    oneshot(source, recipe("W4A16", "lm_head"), None, tmp_path / "nearest")
    model = loaded(source).float()
    with torch.no_grad():
        states = [model.model(batch).last_hidden_state.flatten(0, 1) for batch in token_batches()]
    x = torch.cat(states)
    errors = {}
    for kind in ("gptq", "nearest"):
        quantized = loaded(tmp_path / kind)
        logits(quantized)  # decompresses it
        off = (quantized.lm_head.weight.float() - model.lm_head.weight).detach()
        errors[kind] = float((x @ off.T).square().sum())
    assert errors["gptq"] < 0.8 * errors["nearest"]


def test_the_plan_says_that_a_head_is_untied(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", tied=True)
    module = loaded(source)
    for model in (source, module):
        result = oneshot(model, recipe("W4A16", "Linear"), None, dry_run=True)
        (line,) = [line for line in str(result.plan).splitlines() if "untied" in line]
        assert line.startswith("lm_head is untied from model.embed_tokens: ")
        assert line in result.notes
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.config.tie_word_embeddings is True
    ignoring = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"])
    result = oneshot(source, ignoring, None, tmp_path / "q")
    assert not result.plan.untied and "untied" not in str(result.plan)
    assert settings(tmp_path / "q")["tie_word_embeddings"] is True


def test_a_failed_run_ties_the_module_again(tmp_path: Path) -> None:
    module = loaded(saved(tmp_path / "m", tied=True))
    with pytest.raises(DataError):
        oneshot(module, recipe("gptq", "lm_head"), [object()], tmp_path / "q")
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.config.tie_word_embeddings is True
    assert module.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("kind", ["W4A16", "FP8"])
def test_a_killed_run_with_a_tied_head_resumes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path / "m", tied=True)
    with small_steps():
        oneshot(source, recipe(kind, "Linear"), data_for(kind), tmp_path / "whole")
        with monkeypatch.context() as patch:
            stop_at_mark(patch, 3)
            with pytest.raises(Stop):
                oneshot(source, recipe(kind, "Linear"), data_for(kind), tmp_path / "resumed")
        result = oneshot(source, recipe(kind, "Linear"), data_for(kind), tmp_path / "resumed")
    assert any("resumed after" in note for note in result.notes)
    for file in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "resumed" / file.name).read_bytes()
    assert settings(tmp_path / "resumed") == settings(tmp_path / "whole")


def test_a_head_that_is_stored_although_it_is_tied(tmp_path: Path) -> None:
    """transformers takes the stored one; so does the checkpoint."""
    source = saved(tmp_path / "m", tied=False)
    content = {**settings(source), "tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(content))
    oneshot(source, recipe("W4A16", "Linear"), None, tmp_path / "free")
    oneshot(source, recipe("gptq", "Linear"), token_batches(), tmp_path / "gptq")
    original = saved(tmp_path / "untied", tied=False)
    oneshot(original, recipe("W4A16", "Linear"), None, tmp_path / "expected")
    same_tensors(tmp_path / "free", tmp_path / "expected")
    assert settings(tmp_path / "gptq")["tie_word_embeddings"] is False
    assert validate_folder(tmp_path / "gptq", source, full=True).problems == []


def test_a_head_in_a_model_with_a_tower(tmp_path: Path) -> None:
    """vLLM calls it language_model.lm_head, and reads the setting of the language model."""
    model = other_model("llava", tie_word_embeddings=True)
    model.config.text_config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "m")
    oneshot(tmp_path / "m", recipe("FP8_DYNAMIC", "Linear"), None, tmp_path / "q")
    content = settings(tmp_path / "q")
    assert content["tie_word_embeddings"] is False
    assert content["text_config"]["tie_word_embeddings"] is False
    assert content["quantization_config"]["config_groups"]["group_0"]["targets"] == [
        "re:.*lm_head$",
        "Linear",
    ]
    assert "language_model.lm_head.weight_scale" in read(tmp_path / "q")
    module = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "m", dtype=torch.bfloat16
    )
    oneshot(module, recipe("FP8_DYNAMIC", "Linear"), None, tmp_path / "module")
    same_tensors(tmp_path / "q", tmp_path / "module")
    again = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16
    )
    assert_close(logits(again), logits(module), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "head", "reason"),
    [
        ("whisper", "proj_out", "vLLM computes the logits of a whisper with the embedding"),
        ("bart", "lm_head", "is tied as well, and config.json can only untie them all"),
    ],
)
def test_pairs_that_cannot_be_untied(family: str, head: str, reason: str, tmp_path: Path) -> None:
    """A target that names the head is refused; one for all Linear layers skips it, and says so."""
    other_model(family).save_pretrained(tmp_path / "m")
    with pytest.raises(PlanError, match=rf"{head} shares its weight with .*{reason}"):
        oneshot(tmp_path / "m", recipe("FP8_DYNAMIC", head), None, tmp_path / "q")
    module = other_model(family)
    for model in (tmp_path / "m", module):
        plan = oneshot(model, recipe("FP8_DYNAMIC", "Linear"), None, dry_run=True).plan
        assert not plan.errors and not plan.untied
        (left,) = [left for left in plan.left if left.name == head]
        assert reason in left.reason and left.nbytes == 0


# -- embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["Embedding", EMBEDDING])
def test_embeddings_of_packed_integers_are_written_for_vllm(target: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", tied=False)
    result = oneshot(source, recipe("W4A16", target), None, tmp_path / "q")
    oneshot(loaded(source), recipe("W4A16", target), None, tmp_path / "module")
    same_tensors(tmp_path / "q", tmp_path / "module")
    (warning,) = result.plan.warnings
    assert f"cannot load the packed embedding {EMBEDDING}" in warning
    with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'weight'"):
        loaded(tmp_path / "q")  # else the warning is out of date
    assert validate_folder(tmp_path / "q", source, full=True).problems == []


@pytest.mark.parametrize("with_data", [False, True])
def test_embeddings_of_eight_bit_floats_load(with_data: bool, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", tied=False)
    head = {**FP8, "targets": ["lm_head"]}
    if with_data:
        head["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    chosen = QuantizationModifier(config_groups={"embedding": FP8, "head": head})
    data = token_batches() if with_data else None
    result = oneshot(source, chosen, data, tmp_path / "q")
    assert [w for w in result.plan.warnings if "vLLM" in w] == [
        f"vLLM does not read {EMBEDDING} as stored here; of embeddings it reads the token "
        "embedding, as symmetric integers in groups or channels, such as W4A16. transformers "
        "loads it"
    ]
    module = loaded(source)
    oneshot(module, chosen, data, tmp_path / "module")
    same_tensors(tmp_path / "q", tmp_path / "module")
    assert_close(logits(loaded(tmp_path / "q")), logits(module), rtol=0, atol=0)
    assert validate_folder(tmp_path / "q", source, full=True).problems == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("NVFP4A16", "neither vLLM nor transformers reads as nvfp4-pack-quantized"),
        ("W4A16_ASYM", "neither vLLM nor transformers reads as pack-quantized"),
        ("FP8_DYNAMIC", "its input, token ids, cannot be quantized"),
    ],
)
def test_embeddings_that_nothing_reads(kind: str, reason: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", tied=False)
    options = {"group_size": 32} if kind == "W4A16_ASYM" else {}
    chosen = QuantizationModifier(scheme=kind, targets=["Embedding"], **options)
    for model in (source, loaded(source)):
        with pytest.raises(PlanError, match=f"{EMBEDDING} is an Embedding, .*{reason}"):
            oneshot(model, chosen, None, tmp_path / "q")


def test_positions_are_no_token_embedding(tmp_path: Path) -> None:
    small_model("gpt2", tie_word_embeddings=False).save_pretrained(tmp_path / "m")
    with pytest.raises(PlanError, match=r"wpe is an Embedding, which neither") as refused:
        oneshot(tmp_path / "m", recipe("W4A16", "Embedding"), None, tmp_path / "q")
    assert "wte is an Embedding" not in str(refused.value)


@pytest.mark.parametrize("targets", [[EMBEDDING], ["Linear", "Embedding"]])
def test_a_tied_embedding_is_refused(targets: list[str], tmp_path: Path) -> None:
    source = saved(tmp_path / "m", tied=True)
    for model in (source, loaded(source)):
        with pytest.raises(PlanError, match=r"target lm_head instead, which unties them"):
            oneshot(model, recipe("W4A16", *targets), None, tmp_path / "q")


def test_a_view_reads_an_untied_head(tmp_path: Path) -> None:
    view = CheckpointView(saved(tmp_path / "m", tied=True))
    names = view.names()
    view.untie("lm_head.weight", f"{EMBEDDING}.weight")
    assert view.names() == [*names, "lm_head.weight"]
    assert_close(view.read("lm_head.weight"), view.read(f"{EMBEDDING}.weight"), rtol=0, atol=0)
    assert view.info("lm_head.weight").name == "lm_head.weight"
    assert view.config["tie_word_embeddings"] is False
