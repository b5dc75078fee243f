"""docs/writing-an-algorithm.md: its file works as a command, over ranks and after a kill."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import assert_same_tensors, read
from interruption import Stop, lasting, small_steps, stop_at_mark
from pages import DOCS, own_registrations, write_files

from steelyard.checkpoint import check_checkpoint
from steelyard.checkpoint.provenance import read_provenance
from steelyard.checkpoint.shards import Shards
from steelyard.demo import calibration_texts, model_folder

PAGE = DOCS / "writing-an-algorithm.md"
OPTIONS = ["--samples", "8", "--max-seq-length", "64"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, the demo model and some text."""
    folder = tmp_path_factory.mktemp("page")
    names = [path.name for path in write_files(PAGE, folder)]
    assert names == ["balance.py", "recipe.yaml"]
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(model_folder())
    (folder / "calibration.txt").write_text("\n\n".join(calibration_texts(40)))
    return folder


def command(place: Path, output: str) -> list[str]:
    """Return the command of the page, with less data and another output."""
    text = PAGE.read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("steelyard quantize"))
    words = shlex.split(line)[1:]
    words[words.index("model-balanced")] = output
    return ["-m", "steelyard", *words, *OPTIONS]


def start(place: Path, arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def balanced(place: Path) -> Path:
    out = finish(start(place, command(place, "one")))
    assert "BalanceModifier changed" in out
    return place / "one"


def test_a_norm_and_two_weights_are_changed(balanced: Path) -> None:
    before, after = read(model_folder()), read(balanced)
    provenance = read_provenance(balanced)
    assert provenance is not None
    claimed = provenance.changed
    layers = {name.split(".")[2] for name in before if ".layers." in name}
    leaves = ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"]
    expected = {f"model.layers.{i}.{leaf}.weight" for i in layers for leaf in leaves}
    assert set(claimed) <= expected and len(claimed) >= 3
    norms = [name for name in claimed if "layernorm" in name]
    assert any(not torch.equal(before[name], after[name]) for name in norms)
    for name in norms:
        ratio = before[name].float() / after[name].float()
        assert torch.equal(ratio, 2 ** ratio.log2().round())  # powers of two, as the page says
    plain = {n for n in before if n in after and n not in claimed and "_proj" not in n}
    assert plain and all(torch.equal(before[name], after[name]) for name in plain)


def test_the_checkpoint_is_good(balanced: Path) -> None:
    with Shards(model_folder()) as source:
        assert check_checkpoint(balanced, source=source).problems == []


def test_the_model_is_about_the_same(balanced: Path) -> None:
    """Balancing changes no product, so only the rounding of weights is left of the difference."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(3, 200, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one = AutoModelForCausalLM.from_pretrained(model_folder())(ids).logits.float()
        other = AutoModelForCausalLM.from_pretrained(balanced)(ids).logits.float()
    off = (one - other).square().mean() / one.square().mean()
    assert float(off) < 0.05


def test_the_report_tells(balanced: Path) -> None:
    text = (balanced / "report.json").read_text()
    assert "BalanceModifier changed" in text and "balanced by up to" in text
    assert "BalanceModifier" in (balanced / "recipe.yaml").read_text()


def test_two_ranks_write_the_same(place: Path, balanced: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finish(start(place, [*torchrun, *command(place, "two")]))
    assert_same_tensors(balanced, place / "two")


def test_killed_and_resumed_it_writes_the_same(place: Path, balanced: Path) -> None:
    marking = (
        "from steelyard.checkpoint import CheckpointWriter\nCheckpointWriter.mark_seconds = 0\n"
    )
    (place / "marking.py").write_text(marking)
    process = start(place, [*command(place, "killed"), "--plugin", "marking.py"])  # every layer
    work = place / ".killed.steelyard"
    deadline = time.monotonic() + 200
    while not list(work.glob("hidden-0-2*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (place / "killed").exists()
    out = finish(start(place, command(place, "killed")))
    assert "resumed after" in out
    for file in sorted(balanced.iterdir()):
        assert lasting(place / "killed" / file.name) == lasting(file), file.name


def test_another_version_of_the_file_does_not_resume(tmp_path: Path) -> None:
    """The digest of the file is part of the run's identity, by the name of the algorithm."""
    from steelyard import oneshot
    from steelyard.algorithms import Algorithm
    from steelyard.errors import CheckpointError
    from steelyard.plugins import load_plugin

    text = write_files(PAGE, tmp_path)[0].read_text()
    recipe = (tmp_path / "recipe.yaml").read_text()
    given = {"num_calibration_samples": 4, "max_seq_length": 32}
    for version in ("first", "second"):
        (tmp_path / f"{version}.py").write_text(f"{text}\n# {version}\n")
        with own_registrations():
            load_plugin(str(tmp_path / f"{version}.py"))
            assert list(Algorithm.registry.get("balance")(None).digests()) == ["Balance"]
            with small_steps(), pytest.MonkeyPatch.context() as patch:
                if version == "first":
                    stop_at_mark(patch, 2)
                ends = Stop if version == "first" else CheckpointError
                with pytest.raises(ends) as caught:
                    oneshot(model_folder(), recipe, calibration_texts(4), tmp_path / "q", **given)
    assert "was started with other inputs" in str(caught.value) and "Balance" in str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("nowhere.py", "there is no plug-in file nowhere.py"),
        ("broken.py", "the plug-in broken.py cannot be imported: NameError: name 'nothing'"),
    ],
)
def test_a_plugin_that_cannot_be_imported(
    plugin: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from steelyard.cli.app import run

    monkeypatch.chdir(place)
    (place / "broken.py").write_text("nothing\n")
    arguments = ["quantize", "path/to/model", "-o", "x", "--scheme", "W4A16", "--plugin", plugin]
    assert run(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
