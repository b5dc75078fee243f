"""compare, the command: one row for each case, and the document of the Python call."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import Command

from steelyard.engine.weight_comparison import compare
from steelyard.report import Report, write_files


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
