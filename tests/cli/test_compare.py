"""compare, the command: one row for each case, and the document of the Python call."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import Command

from steelyard import oneshot
from steelyard.engine.weight_comparison import compare
from steelyard.evaluate.checkpoint_comparison import compare_checkpoints
from steelyard.modifiers import QuantizationModifier
from steelyard.report import Report, report_at, write_files


def test_document_is_that_of_the_python_call(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    options = ["--schemes", "w4a16,FP8", "--observers", "memoryless_minmax,optimal"]
    answer = steelyard("compare", model, *options, "--report", report, "--json")
    assert answer.code == 0, answer.err
    names = ["memoryless_minmax", "optimal"]
    expected = compare(model, ["W4A16", "FP8"], names).as_dict()
    for document in (answer.document, json.loads(report.read_text())):
        assert document["schema"] == 1
        for case, other in zip(document["cases"], expected["cases"], strict=True):
            assert {**case, "seconds": 0} == {**other, "seconds": 0}


def test_page_has_layers_by_their_depth(steelyard: Command, model: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    options = ["--schemes", "W8A8", "--observers", "optimal", "--layers", 2, "--report", page]
    assert steelyard("compare", model, *options).code == 0
    data = re.search(r'id="report">(.*?)</script>', page.read_text(), re.DOTALL)
    assert data is not None
    row = json.loads(data[1])["comparison"][0]
    found = compare(model, ["W8A8"], ["optimal"], layers=2)
    first, last = (found.error(found.cases[0], names) for names in found.layers().values())
    assert row["layers"] == [first, None, last]
    assert row["bits_per_weight"] == found.cases[0].bits_per_weight


@pytest.mark.parametrize("suffix", ["json", "html"])
def test_report_replaces_only_a_comparison(
    suffix: str, steelyard: Command, model: Path, tmp_path: Path
) -> None:
    options = ["--schemes", "W8A8", "--observers", "memoryless_minmax", "--layers", 1, "--report"]
    report = tmp_path / f"report.{suffix}"
    for _ in range(2):
        assert steelyard("compare", model, *options, report).code == 0
    run = Report(title="x", notes=["of a run"])
    write_files(run, tmp_path / "run")
    (tmp_path / "theirs").write_text("mine")
    (tmp_path / "link").symlink_to(report)
    taken = [model / "config.json", model / "model.safetensors", tmp_path / "theirs"]
    taken += [tmp_path / "run" / f"report.{suffix}", tmp_path / "link"]
    before = [path.read_bytes() for path in taken]
    for path in taken:
        answer = steelyard("compare", model, *options, path)
        assert (answer.code, answer.out) == (2, ""), path  # before any work
        assert "not replaced" in answer.err or "is a link" in answer.err
    assert [path.read_bytes() for path in taken] == before


def test_tables(steelyard: Command, model: Path) -> None:
    answer = steelyard("compare", model, "--schemes", "W4A16", "--observers", "mse,optimal")
    lines = answer.out.splitlines()
    assert lines[0].split() == ["scheme", "observer", "bits", "error", "SNR", "dB", "worst", "time"]
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["A", "W4A16", "mse"],
        ["B", "W4A16", "optimal"],
    ]
    layers = [line.split() for line in lines if line.startswith("model.layers")]
    assert [row[0] for row in layers] == [f"model.layers.{i}" for i in range(3)]
    assert all(float(row[2]) >= float(row[1]) for row in layers), "optimal is never worse"


def test_scheme_that_does_not_fit_is_told_and_the_others_run(
    steelyard: Command, model: Path
) -> None:
    options = ["--filter", "o_proj", "--schemes", "FP8_BLOCK,W8A8", "--observers", "optimal"]
    whole = steelyard("compare", model, *options)
    assert whole.code == 0
    assert [line.split()[1] for line in whole.out.splitlines()[1:3]] == ["FP8_BLOCK", "W8A8"]


def test_observers_by_output_error(steelyard: Command, workplace: Path, model: Path) -> None:
    data = workplace / "calibration.txt"
    options = ["--schemes", "W4A16", "--observers", "memoryless_minmax", "--samples", 2]
    options += ["--max-seq-length", 32, "--data", data]
    answer = steelyard("compare", model, *options)
    assert answer.code == 0, answer.err
    assert "output error" in answer.out.splitlines()[0]
    assert "errors of outputs, on 2 samples with 64 tokens" in answer.out
    document = steelyard("compare", model, *options, "--json").document
    reading = {"data": str(data), "num_samples": 2, "max_seq_length": 32}
    expected = compare(model, ["W4A16"], ["memoryless_minmax"], **reading).as_dict()
    assert document["measure"] == "output"
    assert document["cases"][0]["modules"] == expected["cases"][0]["modules"]


@pytest.fixture(scope="module")
def checkpoints(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("made")
    model = workplace / "path" / "to" / "model"
    for scheme in ("W4A16", "W8A8"):
        recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head"])
        oneshot(model, recipe, output_dir=folder / scheme)
    return [folder / "W4A16", folder / "W8A8"]


def test_checkpoints(
    steelyard: Command, workplace: Path, model: Path, checkpoints: list[Path], tmp_path: Path
) -> None:
    data, page = workplace / "held-out.txt", tmp_path / "both.html"
    limits = ["--samples", 3, "--max-seq-length", 32, "--base", model, "--data", data]
    answer = steelyard("compare", *checkpoints, *limits, "-o", page)
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["W8A8", "W4A16"], "the closest first"
    assert "closest" in lines[1].split() and "look" in lines[1]
    assert f"report of W8A8: {checkpoints[1] / 'report.html'}" in lines
    document = steelyard("compare", *checkpoints, *limits, "--json").document
    reading = {"num_samples": 3, "max_seq_length": 32}
    expected = compare_checkpoints(model, checkpoints, str(data), **reading).as_dict()
    for found, other in zip(document["checkpoints"], expected["checkpoints"], strict=True):
        for each in (found["evaluation"], other["evaluation"]):
            del each["seconds"]
        assert found == other
    report = report_at(page)
    assert report is not None and [row.name for row in report.checkpoints] == ["W8A8", "W4A16"]
    for row in report.checkpoints:
        assert row.link is not None
        assert (tmp_path / row.link).resolve() == checkpoints[0].parent / row.name / "report.html"
    again = steelyard("compare", *checkpoints, *limits, "-o", page)
    assert again.code == 0, "it replaces its own page"


def test_limits_of_the_verdict_on_checkpoints(
    steelyard: Command, workplace: Path, model: Path, checkpoints: list[Path]
) -> None:
    limits = ["--samples", 3, "--max-seq-length", 32, "--limit", "kl=1e-9:2e-9"]
    data = ["--base", model, "--data", workplace / "held-out.txt"]
    found = steelyard("compare", checkpoints[0], *data, *limits, "--json").document
    measures = {m["name"]: m for m in found["checkpoints"][0]["verdict"]["measures"]}
    assert (measures["kl"]["ship"], measures["kl"]["stop"]) == (1e-9, 2e-9)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["{q}", "{q}"], "--base is missing"),
        (["{q}", "--base", "{m}"], "--data is missing"),
        (["{q}", "--base", "{m}", "--data", "{d}", "--schemes", "W4A16"], "--schemes compares"),
        (["{q}", "--base", "{m}", "--data", "{d}", "--layers", "1"], "--layers compares"),
        (["{m}", "--limit", "kl=1"], "--limit is of the verdict"),
        (["{m}", "--observers", "imatrix_mse"], "weights columns by calibration data"),
        (["{m}", "--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str],
    problem: str,
    steelyard: Command,
    workplace: Path,
    model: Path,
    checkpoints: list[Path],
) -> None:
    places = {"q": checkpoints[0], "m": model, "d": workplace / "held-out.txt"}
    answer = steelyard("compare", *(each.format(**places) for each in options))
    assert answer.code == (1 if "nowhere" in problem else 2) and answer.out == ""
    assert problem in answer.err


def test_bits_and_groups_of_all_schemes(steelyard: Command, model: Path) -> None:
    options = ["--observers", "memoryless_minmax", "--group-size", 32, "--num-bits", 8, "--json"]
    made = steelyard("compare", model, "--schemes", "W4A16", *options).document["cases"][0]
    changes = {"group_size": 32, "num_bits": 8}
    expected = compare(model, ["W4A16"], ["memoryless_minmax"], changes=changes).cases[0]
    plain = compare(model, ["W8A16"], ["memoryless_minmax"], changes={"group_size": 32}).cases[0]
    assert made["bits_per_weight"] == expected.bits_per_weight == plain.bits_per_weight
    assert expected.errors == plain.errors
    answer = steelyard("compare", model, "--schemes", "W4A16,NVFP4A16", *options)
    assert answer.code == 2 and "--group-size does not apply to NVFP4A16" in answer.err
