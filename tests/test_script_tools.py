"""What llm-compressor's scripts call around `oneshot`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from families import read, small_model
from torch.testing import assert_close

import steelyard
from steelyard.errors import PlanError
from steelyard.modifiers import QuantizationModifier

W8A8 = QuantizationModifier(scheme="W8A8", ignore=["lm_head"])


def test_model_free_quantization_writes_what_oneshot_does(source: Path, tmp_path: Path) -> None:
    steelyard.oneshot(source, W8A8, None, tmp_path / "expected")
    expected = read(tmp_path / "expected")
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    ways: list[dict[str, Any]] = [
        {"scheme": "W8A8", "ignore": ["lm_head"], "max_workers": 4, "device": "cpu"},
        {"scheme": scheme, "ignore": ["lm_head"]},
        {"config": config},
    ]
    explicit = QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    steelyard.oneshot(source, explicit, None, tmp_path / "explicit")
    for i, way in enumerate(ways):  # into one folder
        steelyard.model_free_ptq(model_stub=source, save_directory=tmp_path / "q", **way)
        # a preset leaves the observer to the default, a scheme of compressed-tensors names one
        wanted = expected if i == 0 else read(tmp_path / "explicit")
        assert_close(read(tmp_path / "q"), wanted, rtol=0, atol=0)
    for wrong in ({}, {"scheme": "W8A8", "config": config}, {"scheme": "W8A8", "converter": 1}):
        with pytest.raises(PlanError):
            steelyard.model_free_ptq(source, tmp_path / "r", **wrong)


def test_checkpoint_is_converted_before_it_is_quantized(source: Path, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert import (
        CompressedTensorsDequantizer,
        convert_checkpoint,
    )

    int8, out = tmp_path / "int8", tmp_path / "below" / "q"
    steelyard.oneshot(source, W8A8, None, int8)
    kept = ["lm_head", "re:.*norm$", "re:.*embed_tokens$"]
    convert_checkpoint(
        model_stub=int8,
        save_directory=tmp_path / "dense",
        converter=CompressedTensorsDequantizer(str(int8), ignore=kept),
        max_workers=1,
    )
    steelyard.model_free_ptq(tmp_path / "dense", tmp_path / "expected", "FP8_DYNAMIC", ignore=kept)
    result = steelyard.model_free_ptq(
        model_stub=int8,
        save_directory=out,
        scheme="FP8_DYNAMIC",
        ignore=kept,
        converter=CompressedTensorsDequantizer(str(int8), ignore=kept),
    )
    assert any("by CompressedTensorsDequantizer" in note for note in result.notes)
    found, expected = read(out), read(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[n].view(torch.uint8), expected[n].view(torch.uint8)) for n in found
    )
    assert [path.name for path in out.parent.iterdir()] == ["q"]  # no temporary folder


def test_experts_are_left_to_oneshot() -> None:
    from steelyard.modeling.moe.context import moe_calibration_context
    from steelyard.modeling.moe.linearize import linearize_moe
    from steelyard.utils.dev import skip_weights_initialize

    with skip_weights_initialize():
        model = small_model("qwen3_moe")
    assert linearize_moe(model) is model
    with moe_calibration_context(model, calibrate_all_experts=True):
        experts = [type(m).__name__ for n, m in model.named_modules() if n.endswith("experts")]
    assert set(experts) == {"Qwen3MoeExperts"}
    with (
        pytest.raises(ValueError, match="set its parameters to zero"),
        skip_weights_initialize(True),
    ):
        raise AssertionError("not reached")


def test_no_samples_are_no_data() -> None:
    run = {"model": small_model("llama"), "recipe": W8A8, "num_calibration_samples": 0}
    assert len(steelyard.oneshot(**run).modules) == 21
    with pytest.raises(ValueError, match="num_calibration_samples must be at least 1"):
        steelyard.oneshot(**run, dataset=["some text"])


def test_run_that_is_set_up_first() -> None:
    model = small_model("llama")
    run = steelyard.Oneshot(model=model, recipe=W8A8)
    assert run.result is None and run.recipe is W8A8
    run()
    assert run.model is model and run.result is not None and len(run.result.modules) == 21
    with pytest.raises(TypeError, match="recpie"):
        steelyard.Oneshot(model=model, recpie=W8A8)


def test_result_acts_as_the_model(tmp_path: Path) -> None:
    from steelyard.utils import dispatch_for_generation

    model = small_model("llama")
    result = steelyard.oneshot(model=model, recipe=W8A8)
    ids = torch.tensor([[5, 6, 7]])
    assert_close(result(ids).logits, model(ids).logits, rtol=0, atol=0)
    made = result.generate(ids, max_new_tokens=2, do_sample=False)
    assert_close(made, model.generate(ids, max_new_tokens=2, do_sample=False), rtol=0, atol=0)
    assert list(result.modules()) == list(model.modules())
    assert len(result.modules) == 21 and result.config is model.config
    result.save_pretrained(tmp_path / "q", save_compressed=True)
    assert read(tmp_path / "q")["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert dispatch_for_generation(result) is model
    assert len(repr(result)) < 200
    assert not hasattr(result, "no_such_thing")


def test_result_without_a_module_says_how_to_load_it(source: Path, tmp_path: Path) -> None:
    result = steelyard.oneshot(source, W8A8, None, tmp_path / "q")
    with pytest.raises(AttributeError, match=r"from_pretrained\('.*q'\)"):
        result.generate  # noqa: B018
    with pytest.raises(TypeError, match="from_pretrained"):
        result(torch.tensor([[5]]))


def test_models_are_loaded_in_host_memory(source: Path) -> None:
    from steelyard.utils import load_context
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    for kind in (None, LlamaForCausalLM):
        used: Any = kind or AutoModelForCausalLM
        before = used.from_pretrained
        with load_context(*([kind] if kind else [])):
            model = used.from_pretrained(source, dtype="auto", device_map="auto_offload")
        assert model.device.type == "cpu" and used.from_pretrained == before


def test_rows_of_a_rank() -> None:
    from steelyard.datasets import get_rank_partition

    assert get_rank_partition("train", 10) == "train[0:10]"
    with pytest.raises(ValueError, match="slice already"):
        get_rank_partition("train[:5]", 10)


def test_untied_head_has_its_own_weight() -> None:
    from steelyard.utils import untie_word_embeddings

    model = small_model("llama", tie_word_embeddings=True)
    untie_word_embeddings(model)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head.data_ptr() != embedding.data_ptr()
    assert_close(head, embedding, rtol=0, atol=0)
    assert model.config.tie_word_embeddings is False


def test_sessions_can_be_created_and_reset() -> None:
    outer = steelyard.active_session()
    with steelyard.create_session() as session:
        assert steelyard.active_session() is session is not outer
        steelyard.reset_session()
    assert steelyard.active_session() is outer
    with pytest.raises(AttributeError, match="write an algorithm"):
        steelyard.callbacks.batch_start()


def test_logger_of_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.log"
    try:
        steelyard.configure_logger(
            steelyard.LoggerConfig(console_log_level="WARNING", log_file=str(file))
        )
        steelyard.logger.info("{} samples", 3)
        steelyard.logger.warning("few of them")
        steelyard.configure_logger(steelyard.LoggerConfig(disabled=True))
        steelyard.logger.error("not logged")
    finally:
        logging.getLogger("steelyard").disabled = False
        logging.getLogger("steelyard").handlers.clear()
    assert [line.split(" ", 2)[2] for line in file.read_text().splitlines()] == [
        "INFO 3 samples",
        "WARNING few of them",
    ]
    said = capsys.readouterr().err
    assert "few of them" in said and "3 samples" not in said and "not logged" not in said
