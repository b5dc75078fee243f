"""quantize: the same as the Python call, and what it says about it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import Command, expected_warning
from families import assert_same_tensors, read

from steelyard import oneshot
from steelyard.checkpoint import CheckpointWriter, Shards, validate_checkpoint
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
from steelyard.report import read_report


def test_document_and_checkpoint_are_those_of_the_python_call(
    process: Command, model: Path, tmp_path: Path
) -> None:
    answer = process("quantize", model, "-o", "out", "--scheme", "W4A16", "--json")
    assert answer.code == 0, answer.err
    recipe = QuantizationModifier(scheme="W4A16", ignore=["lm_head"], weight_observer="optimal")
    expected = oneshot(model, recipe, output_dir=tmp_path / "expected")
    assert_same_tensors(tmp_path / "out", tmp_path / "expected")
    found = answer.document
    assert (found["schema"], found["command"]) == (1, "quantize")
    assert found["modules"] == {
        name: {"error": m.error, "tokens": m.tokens, "details": {}}
        for name, m in expected.modules.items()
    }
    assert found["report"] == str(tmp_path / "out" / "report.html")
    report, other = read_report(tmp_path / "out"), read_report(tmp_path / "expected")
    assert report.modules == other.modules, "with figures"
    assert found["source_bytes"] == Shards(model).total_bytes
    assert found["output_bytes"] == Shards(tmp_path / "out").total_bytes
    assert {"name": "lm_head", "reason": "ignored by 'lm_head'"} in found["left"]
    assert "will quantize 21 modules" in answer.err  # the plan


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        (
            ["--scheme", "fp8", "--observer", "memoryless-minmax"],
            QuantizationModifier(
                scheme="FP8", ignore=["lm_head"], weight_observer="memoryless_minmax"
            ),
        ),
        (
            ["--scheme", "W4A16", "--gptq"],
            GPTQModifier(scheme="W4A16", ignore=["lm_head"]),
        ),
        (
            ["--scheme", "W4A16", "--ignore", ""],
            [
                IMatrixGatherer(ignore=[]),
                QuantizationModifier(scheme="W4A16", weight_observer="optimal"),
            ],
        ),
        (
            ["--scheme", "NVFP4", "--ignore", "lm_head", "--ignore", "re:.*down_proj"],
            QuantizationModifier(
                scheme="NVFP4", ignore=["lm_head", "re:.*down_proj"], weight_observer="optimal"
            ),
        ),
    ],
    ids=["static", "gptq", "importance", "ignore"],
)
def test_data_runs_are_those_of_the_python_call(
    options: list[str],
    recipe: Any,
    steelyard: Command,
    workplace: Path,
    model: Path,
    tmp_path: Path,
) -> None:
    data = workplace / "calibration.txt"
    limits = ["--samples", 3, "--max-seq-length", 32, "--batch-size", 2, "--seed", 5]
    answer = steelyard("quantize", model, "-o", tmp_path / "a", "--data", data, *options, *limits)
    assert answer.code == 0, answer.err
    oneshot(
        model,
        recipe,
        str(data),
        tmp_path / "b",
        num_calibration_samples=3,
        max_seq_length=32,
        batch_size=2,
        seed=5,
    )
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    assert "3 samples with 96 tokens" in answer.out
    assert f"checkpoint: {tmp_path / 'a'}" in answer.out


def test_observer_without_importance_reads_no_data(
    process: Command, workplace: Path, model: Path, tmp_path: Path
) -> None:
    options = ("--scheme", "W4A16", "--observer", "memoryless_mse")
    data = ("--data", workplace / "calibration.txt")
    expected = expected_warning("the recipe needs no", UserWarning)
    answer = process("quantize", model, "-o", tmp_path / "q", *options, *data, **expected)
    assert answer.code == 0
    assert "the recipe needs no calibration data; the dataset is not read" in answer.out


def test_summary_has_a_line_for_each_kind_of_module(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    answer = steelyard("quantize", model, "-o", tmp_path / "q", "--scheme", "W8A8")
    lines = answer.out.splitlines()
    assert lines[0].split() == ["modules", "count", "error", "worst"]
    assert lines[1].split()[:2] == ["model.layers.{0-2}.mlp.down_proj", "3"]
    assert len([line for line in lines if line.startswith("model.layers.{0-2}")]) == 7
    assert not any(line.startswith("note:") for line in lines), "the plan's warnings, once more"
    assert "not quantized: lm_head (ignored by 'lm_head')" in lines
    assert any(line.startswith("21 modules quantized in") for line in lines)
    assert answer.err.startswith("will quantize 21 modules")


def test_calibrating_on_two_tokens_is_a_warning(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "two.txt"
    data.write_text("a b")
    options = ["--scheme", "FP8", "--data", data, "--max-seq-length", 2, "--samples", 1]
    answer = steelyard("quantize", model, "-o", tmp_path / "q", *options)
    assert answer.code == 0
    for text in (answer.err, answer.out):
        warned = [line for line in text.splitlines() if line.startswith("warning: calibrating on")]
        assert len(warned) == 1 and "use at least 1024" in warned[0]
    options += ["--overwrite", "--json"]
    document = steelyard("quantize", model, "-o", tmp_path / "q", *options).document
    assert any("calibrating on" in warning for warning in document["warnings"])


def test_group_size(steelyard: Command, model: Path, tmp_path: Path) -> None:
    options = ["--scheme", "W4A16", "--group-size", 32, "--targets", "re:.*q_proj"]
    out = tmp_path / "q"
    answer = steelyard("quantize", model, "-o", out, *options, "--dry-run", "--json")
    assert answer.code == 2, "the server fuses q with k and v"
    assert "fuse" in answer.document["errors"][0]
    options[-1] = "re:.*o_proj"
    assert steelyard("quantize", model, "-o", out, *options).code == 0
    assert read(out)["model.layers.0.self_attn.o_proj.weight_scale"].shape == (128, 4)
    answer = steelyard("quantize", model, "-o", out, "--scheme", "NVFP4A16", "--group-size", 32)
    assert answer.code == 2
    assert "--group-size does not apply to NVFP4A16" in answer.err


def test_num_bits(steelyard: Command, model: Path, tmp_path: Path) -> None:
    options = ["--scheme", "W4A16", "--num-bits", 8, "--group-size", 32]
    assert steelyard("quantize", model, "-o", tmp_path / "q", *options).code == 0
    packed = read(tmp_path / "q")["model.layers.0.self_attn.o_proj.weight_packed"]
    assert packed.shape == (128, 128 // 4)
    answer = steelyard("quantize", model, "-o", tmp_path / "r", "--scheme", "FP8", "--num-bits", 4)
    assert answer.code == 2 and "--num-bits does not apply to FP8" in answer.err


def test_dry_run_prints_the_plan_and_writes_nothing(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    answer = steelyard("quantize", model, "--scheme", "W4A16", "--dry-run")
    recipe = QuantizationModifier(scheme="W4A16", ignore=["lm_head"], weight_observer="optimal")
    assert answer.code == 0
    assert answer.out.strip() == str(oneshot(model, recipe, dry_run=True).plan)
    assert list(tmp_path.iterdir()) == []


def test_evaluate_in_the_same_command(
    steelyard: Command, workplace: Path, model: Path, tmp_path: Path
) -> None:
    held_out, limits = workplace / "held-out.txt", ["--max-seq-length", 32]
    arguments = ["--scheme", "W4A16", "--evaluate", held_out, *limits]
    answer = steelyard("quantize", model, "-o", tmp_path / "one", *arguments)
    assert answer.code == 0, answer.err
    assert "verdict: " in answer.out and f"tokens of {held_out}" in answer.out
    assert steelyard("quantize", model, "-o", tmp_path / "two", "--scheme", "W4A16").code == 0
    steelyard("evaluate", model, tmp_path / "two", "--data", held_out, *limits)
    one, two = (read_report(tmp_path / name) for name in ("one", "two"))
    assert one.verdict is not None and one.verdict == two.verdict
    assert one.blocks == two.blocks and one.better_recipe == two.better_recipe
    assert validate_checkpoint(tmp_path / "one") == []
    output = tmp_path / "json"
    found = steelyard("quantize", model, "-o", output, *arguments, "--json").document
    assert found["evaluation"]["verdict"]["word"] == one.verdict.word
    assert found["output"] == str(output)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("gone.txt", None, "gone.txt"),
        ("empty.txt", "", "empty"),
        ("short.jsonl", '{"text": ""}', "empty"),
        ("other.jsonl", '{"body": "w1 w2"}', "--text-column"),
    ],
)
def test_held_out_data_is_checked_before_the_run(
    name: str,
    content: str | None,
    problem: str,
    more: list[str],
    steelyard: Command,
    model: Path,
    tmp_path: Path,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    arguments = ["--scheme", "W4A16", "--evaluate", tmp_path / name, *more]
    answer = steelyard("quantize", model, "-o", tmp_path / "q", *arguments)
    assert answer.code == 1 and problem in answer.err
    assert answer.out == "" and "will quantize" not in answer.err
    assert not (tmp_path / "q").exists()


def test_interrupted_evaluation_leaves_the_checkpoint(
    steelyard: Command,
    workplace: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("steelyard.evaluate.studies.evaluate", stop)
    arguments = ["--scheme", "W8A8", "--evaluate", workplace / "held-out.txt"]
    answer = steelyard("quantize", model, "-o", tmp_path / "q", *arguments)
    assert answer.code == 130 and "is complete" in answer.err
    assert validate_checkpoint(tmp_path / "q") == []


def test_interrupted_run_is_taken_up_again(
    steelyard: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("quantize", model, "-o", tmp_path / "q", "--scheme", "W4A16")
    assert steelyard(*arguments[:3], tmp_path / "expected", *arguments[4:]).code == 0
    add, asked = CheckpointWriter.add, threading.Event()
    # a shell starts what runs in its background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(self: CheckpointWriter, *given: Any) -> None:
        add(self, *given)
        if not asked.is_set():
            asked.set()
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(1)  # the run must not end before it is interrupted

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "add", interrupted)
        answer = steelyard(*arguments)
    signal.signal(signal.SIGINT, before)
    assert answer.code == 130
    assert answer.err.splitlines()[-1] == ("error: interrupted; the same command resumes the run")
    assert not (tmp_path / "q").exists()
    assert steelyard(*arguments).code == 0
    assert validate_checkpoint(tmp_path / "q", source=Shards(model)) == []
    assert_same_tensors(tmp_path / "q", tmp_path / "expected")


def test_only_the_first_rank_speaks(
    steelyard: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("quantize", model, "--scheme", "W8A8", "--dry-run")
    monkeypatch.setenv("RANK", "1")
    assert steelyard(*arguments) == (0, "", "")
    assert steelyard(*arguments, "--json") == (0, "", "")
    failed = steelyard("quantize", model, "--scheme", "W9A9")
    assert failed.err.startswith("error (rank 1): there is no scheme 'W9A9'")
    monkeypatch.setenv("RANK", "0")
    assert "21 modules" in steelyard(*arguments).out


@pytest.mark.parametrize("given", ["folder", "name"])
def test_tokenizer_brings_its_files_alone(
    given: str, steelyard: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder with other things in it, or by a name on the hub, here in its cache."""
    bare, folder = tmp_path / "bare", tmp_path / "hub" / "models--org--tokens"
    tokens = folder / "snapshots" / "c0ffee"
    for place in (bare, tokens):
        place.mkdir(parents=True)
    for file in model.iterdir():
        place = tokens if file.name.startswith(("tokenizer", "special")) else bare
        (place / file.name).write_bytes(file.read_bytes())
    (tokens / "secrets.json").write_text("{}")
    (tokens / "calibration.txt").write_text("mine")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = tokens if given == "folder" else "org/tokens"
    out = tmp_path / "q"
    options = ("--scheme", "FP8_DYNAMIC", "--tokenizer", name)
    answer = steelyard("quantize", bare, "-o", out, *options)
    assert answer.code == 0, answer.err
    before = {file.name for file in model.iterdir()}
    assert before <= {file.name for file in out.iterdir()}
    assert not (out / "secrets.json").exists() and not (out / "calibration.txt").exists()
