"""observe, merge and quantize --statistics: calibration in parts is calibration at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command
from families import assert_same_tensors


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of a text, and the whole, in rows of one length."""
    monkeypatch.chdir(tmp_path)
    rows = [
        '{"text": "' + " ".join(f"w{i * j % 12 + i // 3}" for j in range(11)) + '"}\n'
        for i in range(90)
    ]
    for name, start, stop in (("first", 0, 40), ("second", 40, 90), ("all", 0, 90)):
        Path(f"{name}.jsonl").write_text("".join(rows[start:stop]))


def test_parts_are_the_whole(steelyard: Command, model: Path, texts: None, tmp_path: Path) -> None:
    given = ("--scheme", "FP8")
    for part in ("first", "second"):
        answer = steelyard("observe", model, *given, "--data", f"{part}.jsonl", "-o", part)
        assert answer.code == 0, answer.err
        assert f"{part}: statistics of 21 modules" in answer.out
    answer = steelyard("merge", "first", "second", "-o", "both")
    assert answer.code == 0, answer.err
    assert "both: 2 files merged" in answer.out
    answer = steelyard("quantize", model, *given, "--statistics", "both", "-o", "parts")
    assert answer.code == 0, answer.err
    assert "statistics of 90 samples with 990 tokens in 2 runs, from both" in answer.out
    answer = steelyard("observe", model, *given, "--data", "all.jsonl", "-o", "whole", "--json")
    assert answer.code == 0, answer.err
    assert set(answer.document["tokens"].values()) == {990}
    answer = steelyard("quantize", model, *given, "--data", "all.jsonl", "-o", "at-once")
    assert answer.code == 0, answer.err
    first = steelyard("quantize", model, *given, "--statistics", "first", "-o", "only-first")
    assert first.code == 0, first.err
    assert_same_tensors(tmp_path / "parts", tmp_path / "at-once")
    with pytest.raises(AssertionError):
        assert_same_tensors(tmp_path / "only-first", tmp_path / "at-once")


def test_mistakes_are_told_without_a_trace(
    steelyard: Command, model: Path, texts: None, tmp_path: Path
) -> None:
    data = ("--data", "first.jsonl", "-o", "s")
    answer = steelyard("observe", model, "--scheme", "W4A16", *data)
    assert answer.code == 2 and "observe has no effect" in answer.err
    assert steelyard("observe", model, "--scheme", "FP8", *data).code == 0
    answer = steelyard("merge", "s", "s", "-o", "t")
    assert answer.code == 1 and "s is given twice, which would count twice" in answer.err
    answer = steelyard("merge", "s", "first.jsonl", "-o", "t")
    assert answer.code == 1 and "first.jsonl is not a statistics file" in answer.err
    answer = steelyard("quantize", model, "--scheme", "NVFP4", "--statistics", "s", "-o", "q")
    assert answer.code == 1 and "does not fit weight of model.layers.0" in answer.err
    answer = steelyard(
        "quantize", model, "--scheme", "W4A16", "--gptq", "--statistics", "s", "-o", "q"
    )
    assert answer.code == 2 and "--statistics does not work with GPTQModifier" in answer.err
    assert "Traceback" not in answer.err and not (tmp_path / "q").exists()


def test_other_files_are_not_replaced(
    steelyard: Command, model: Path, texts: None, tmp_path: Path
) -> None:
    observe = ("observe", model, "--scheme", "FP8", "--data", "first.jsonl", "--samples", 2)
    assert steelyard(*observe, "-o", "s").code == 0
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    for name in ("model.safetensors", "config.json"):
        for command in (observe, ("merge", "s")):
            answer = steelyard(*command, "-o", model / name)
            assert (answer.code, answer.out) == (1, "")
            assert "holds no statistics of Steelyard, so it is not replaced" in answer.err
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    assert steelyard(*observe, "-o", "s").code == 0  # its own kind
    answer = steelyard("merge", "s", "-o", "s/t")
    assert answer.code == 1 and "s is not a folder" in answer.err
