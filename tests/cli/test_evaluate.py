"""evaluate, the command: the numbers of the Python call."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from json import dumps as json_text
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from multimodal import multimodal_model
from processors import llava, picture

from steelyard.evaluate import divergence as compare
from steelyard.evaluate import evaluate
from steelyard.model.layerwise import LayerwiseModel
from steelyard.report import Report


def test_document_is_that_of_the_python_call(
    steelyard: Command, workplace: Path, model: Path, tmp_path: Path
) -> None:
    quantized, data = tmp_path / "q", workplace / "held-out.txt"
    assert steelyard("quantize", model, "-o", quantized, "--scheme", "W4A16").code == 0
    limits = ["--samples", 3, "--max-seq-length", 32]
    arguments = ("evaluate", model, quantized, "--data", data, *limits)
    answer = steelyard(*arguments, "--json")
    assert answer.code == 0, answer.err
    expected = evaluate(model, quantized, str(data), num_samples=3, max_seq_length=32).as_dict()
    found = answer.document
    assert (found["schema"], found["command"]) == (1, "evaluate")
    assert {k: found[k] for k in expected.keys() - {"seconds"}} == {
        k: v for k, v in expected.items() if k != "seconds"
    }
    assert expected["kl_divergence"] > 0
    lines = steelyard(*arguments).out.splitlines()
    assert lines[1].split() == [
        "perplexity",
        f"{expected['base_perplexity']:.3f}",
        f"{expected['perplexity']:.3f}",
        f"{100 * (expected['perplexity'] / expected['base_perplexity'] - 1):+.2f}",
        "%",
    ]
    assert lines[2].split()[-1] == f"{expected['kl_divergence']:.4g}"
    assert lines[3].split()[0:4:3] == ["KL,", f"{expected['kl_p99']:.4g}"]
    assert lines[4].split()[-2] == f"{100 * expected['top1_agreement']:.1f}"


def test_images_of_a_file_go_through_the_processor_of_the_model(
    steelyard: Command, tmp_path: Path
) -> None:
    multimodal_model("llava").save_pretrained(tmp_path / "m")
    llava().save_pretrained(tmp_path / "m")
    quantized, data = tmp_path / "q", tmp_path / "data.jsonl"
    groups = ["--scheme", "W4A16", "--group-size", 16]
    assert steelyard("quantize", tmp_path / "m", "-o", quantized, *groups).code == 0
    picture().save(tmp_path / "picture.png")
    row = {"text": "w5 <image> w7 w8", "image": str(tmp_path / "picture.png")}
    data.write_text(json_text(row))
    answer = steelyard("evaluate", tmp_path / "m", quantized, "--data", data, "--json")
    assert answer.code == 0, answer.err
    sample = dict(llava()(text=[row["text"]], images=[picture()], return_tensors="pt"))
    expected = evaluate(tmp_path / "m", quantized, [sample])
    assert (answer.document["samples"], answer.document["tokens"]) == (1, 2)
    assert answer.document["kl_divergence"] == expected.kl_divergence > 0


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("damage", ["", "{", '{"schema_version": 99}', "[]", "no place"])
def test_report_that_cannot_be_updated_costs_no_figures(
    damage: str, json: bool, steelyard: Command, workplace: Path, model: Path, tmp_path: Path
) -> None:
    data = workplace / "held-out.txt"
    quantized = tmp_path / "q"
    quantized.mkdir()
    for file in model.iterdir():
        (quantized / file.name).write_bytes(file.read_bytes())
    report = quantized / "report.json"
    if damage == "no place":
        report.write_text(Report(title="x").to_json())
        (quantized / "report.html").mkdir()
    else:
        report.write_text(damage)
    arguments = ("evaluate", model, quantized, "--data", data, "--samples", 1)
    answer = steelyard(*arguments, "--max-seq-length", 16, *(["--json"] if json else []))
    assert answer.code == 1
    if json:
        assert answer.document["perplexity"] > 1
    else:
        assert "perplexity" in answer.out and "over 15 tokens" in answer.out
        assert "added to" not in answer.out
    error = answer.err.splitlines()[-1]
    assert error.startswith("error: the figures above were not added to the report: ")
    assert str(report.with_suffix("")) in error


def test_the_plan_tells_how_much_and_how_long(
    steelyard: Command, workplace: Path, model: Path
) -> None:
    limits = ["--samples", 3, "--max-seq-length", 32, "--batch-size", 2]
    said = steelyard("evaluate", model, model, "--data", workplace / "held-out.txt", *limits).err
    assert re.match(
        r"evaluating 93 tokens of 3 samples, in 2 batches through 3 layers of each model: "
        r"about \d+ s\n",
        said,
    )


def interrupt_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with an interrupt in one of its calls."""
    calls = itertools.count(1)

    def call(*given: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*given)

    return call


@pytest.mark.parametrize("json", [False, True])
def test_interrupted_it_prints_the_figures_so_far(
    json: bool,
    steelyard: Command,
    workplace: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantized = tmp_path / "q"
    assert steelyard("quantize", model, "-o", quantized, "--scheme", "W4A16").code == 0
    arguments = ["evaluate", model, quantized, "--data", workplace / "held-out.txt"]
    arguments += ["--max-seq-length", 32, "--samples"]
    two = steelyard(*arguments, 2).out.splitlines()
    report = (quantized / "report.json").read_bytes()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "_scores", interrupt_call(3, compare._scores))
        answer = steelyard(*arguments, 5, *(["--json"] if json else []))
    signal.signal(signal.SIGINT, before)
    assert answer.code == 130
    message = "error: interrupted; 62 of 155 tokens were scored"
    if json:
        assert (answer.out, answer.err.splitlines()[-1]) == ("", message)
    else:
        assert answer.out.splitlines()[:7] == two[:7]
        assert answer.err.splitlines()[-1] == f"{message}; the figures above are for those"
    assert (quantized / "report.json").read_bytes() == report


def test_interrupted_before_there_are_figures(
    steelyard: Command, workplace: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(LayerwiseModel, "_check", interrupt_call(5, LayerwiseModel._check))
    limits = ["--samples", 3, "--max-seq-length", 32]
    answer = steelyard("evaluate", model, model, "--data", workplace / "held-out.txt", *limits)
    signal.signal(signal.SIGINT, before)
    assert (answer.code, answer.out) == (130, "")
    assert answer.err.splitlines()[-1] == (
        "error: interrupted; there are no figures yet: tokens are scored after the last layer of "
        "both models"
    )


def test_missing_data(steelyard: Command, model: Path) -> None:
    answer = steelyard("evaluate", model, model)
    assert (answer.code, answer.out) == (2, "")
    assert "missing option '--data'" in answer.err
    gone = steelyard("evaluate", model, model, "--data", "none.txt")
    assert gone.code == 1
    assert "there is no file 'none.txt'" in gone.err
