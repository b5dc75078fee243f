"""evaluate, the command: the numbers of the Python call."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command

from steelyard.evaluate import evaluate
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
    ]
    assert lines[2].split()[-1] == f"{expected['kl_divergence']:.4g}"
    assert lines[3].split()[-2] == f"{100 * expected['top1_agreement']:.1f}"


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


def test_missing_data(steelyard: Command, model: Path) -> None:
    answer = steelyard("evaluate", model, model)
    assert (answer.code, answer.out) == (2, "")
    assert "missing option '--data'" in answer.err
    gone = steelyard("evaluate", model, model, "--data", "none.txt")
    assert gone.code == 1
    assert "there is no file 'none.txt'" in gone.err
