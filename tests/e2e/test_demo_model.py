"""From the demo model to a measured checkpoint, by commands.

What the numbers are held against is what is known of quantization: fewer bits lose more, and data
helps where bits are few. The distances between the rows are far larger than what another version of
Python, whose library is the text, moves them.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.cli.app import run
from steelyard.demo import calibration_texts, held_out_texts, model_folder

MODEL = model_folder()
ROOT = Path(__file__).parents[2]
CALIBRATION = ["--samples", "16", "--max-seq-length", "256"]
SCHEMES: dict[str, list[str]] = {
    "W8A16": ["--scheme", "W8A16"],
    "FP8": ["--scheme", "FP8", "--data", "calibration.jsonl", *CALIBRATION],
    "NVFP4A16": ["--scheme", "NVFP4A16"],
    "GPTQ": ["--scheme", "W4A16", "--gptq", "--data", "calibration.jsonl", *CALIBRATION],
    "weighed": ["--scheme", "W4A16", "--data", "calibration.jsonl", *CALIBRATION],
    "minmax": ["--scheme", "W4A16", "--observer", "memoryless_minmax"],
    "W3": ["--recipe", "w3.yaml"],
}
W3 = """
QuantizationModifier:
  ignore: [lm_head]
  config_groups:
    all:
      targets: [Linear]
      weights: {num_bits: 3, strategy: group, group_size: 128}
"""
Command = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("e2e")
    for name, texts in (("calibration", calibration_texts(16)), ("held-out", held_out_texts(8))):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (made / f"{name}.jsonl").write_text(lines, "utf-8")
    (made / "w3.yaml").write_text(W3, "utf-8")
    return made


@pytest.fixture(scope="module")
def steelyard(folder: Path) -> Iterator[Command]:
    """Give a command in the folder, and return what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        threads, before = torch.get_num_threads(), dict(os.environ)

        def command(*arguments: object) -> str:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert run([str(each) for each in arguments]) == 0, arguments
            return printed.getvalue()

        yield command
        torch.set_num_threads(threads)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


@pytest.fixture(scope="module")
def evaluations(steelyard: Command, folder: Path) -> dict[str, dict[str, Any]]:
    """Quantize in every way, and measure each."""
    found = {}
    limits = ["--data", "held-out.jsonl", "--max-seq-length", 256]
    for name, options in SCHEMES.items():
        steelyard("quantize", MODEL, "-o", name, *options)
        found[name] = json.loads(steelyard("evaluate", MODEL, name, *limits, "--json"))
    return found


def test_fewer_bits_lose_more_and_data_helps(evaluations: dict[str, dict[str, Any]]) -> None:
    kl = {name: found["kl_divergence"] for name, found in evaluations.items()}
    assert 0 < kl["W8A16"] < kl["GPTQ"] / 10
    assert kl["W8A16"] < kl["NVFP4A16"] < kl["minmax"]
    assert kl["GPTQ"] < kl["weighed"] < kl["minmax"]
    assert 2 * kl["minmax"] < kl["W3"]
    assert kl["W8A16"] < kl["FP8"] < kl["W3"], "inputs are rounded too"
    base = {found["base_perplexity"] for found in evaluations.values()}
    assert len(base) == 1 and base.pop() < 100
    for name, found in evaluations.items():
        assert math.isfinite(found["perplexity"])
        assert abs(math.log(found["perplexity"] / found["base_perplexity"])) < 0.05, name
        assert found["tokens"] > 1500
    agreement = {name: found["top1_agreement"] for name, found in evaluations.items()}
    assert agreement["W3"] < agreement["minmax"] < agreement["W8A16"] <= 1


def test_commands_in_processes_of_their_own(
    folder: Path, evaluations: dict[str, dict[str, Any]]
) -> None:
    """As a user gives them: the same numbers as in one process."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    limits = ["--data", "held-out.jsonl", "--max-seq-length", "256", "--json"]
    for arguments in (
        ["quantize", str(MODEL), "-o", "process", *SCHEMES["GPTQ"], "--json"],
        ["validate", "process", "--source", str(MODEL), "--json"],
        ["evaluate", str(MODEL), "process", *limits],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "steelyard", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
    assert document["kl_divergence"] == pytest.approx(evaluations["GPTQ"]["kl_divergence"], rel=0.1)


@pytest.mark.parametrize("name", SCHEMES)
def test_checkpoint_is_good_and_its_report_has_the_evaluation(
    name: str, steelyard: Command, folder: Path, evaluations: dict[str, dict[str, Any]]
) -> None:
    checked = json.loads(steelyard("validate", name, "--source", MODEL, "--json"))
    assert (checked["modules"], checked["problems"]) == (21, [])
    contents = json.loads(steelyard("inspect", name, "--json"))
    report = json.loads((folder / name / "report.json").read_text("utf-8"))
    assert report["summary"]["output_bytes"] == contents["bytes"]
    assert [m["name"] for m in report["modules"]] and len(report["modules"]) == 21
    expected = evaluations[name]
    assert report["evaluation"]["kl_divergence"] == expected["kl_divergence"]
    assert report["evaluation"]["perplexity"] == expected["perplexity"]
    assert str(expected["kl_divergence"]) in (folder / name / "report.html").read_text("utf-8")


def test_compare_writes_a_page_that_holds_its_numbers(steelyard: Command, folder: Path) -> None:
    options = ["--schemes", "W4A16,W8A8", "--observers", "memoryless_minmax,optimal"]
    found = json.loads(steelyard("compare", MODEL, *options, "--report", "c.html", "--json"))
    page = (folder / "c.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    for case in found["cases"]:
        assert str(case["error"]) in page


def test_demo_tells_the_same_and_leaves_its_reports(steelyard: Command, folder: Path) -> None:
    limits = ["--samples", 2, "--max-seq-length", 64]
    found = json.loads(steelyard("demo", "-o", "demo", *limits, "--json"))
    assert Path(found["report"]) == Path("demo/report.html")
    rows = json.loads((folder / "demo" / "report.json").read_text("utf-8"))["comparison"]
    assert [row["evaluation"]["kl_divergence"] for row in rows] == [
        each["evaluation"]["kl_divergence"] for each in found["results"]
    ]
    for each in found["results"]:
        assert (folder / each["output"] / "model.safetensors").is_file()
        assert (folder / each["report"]).is_file()
    bits = [each["bits_per_weight"] for each in found["results"]]
    expected = [8.125, 8.05, 8.05, *[4.5] * 3, *[4.125] * 3, *[3.125] * 3]
    assert bits == pytest.approx(expected, abs=0.01)
