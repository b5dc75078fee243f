"""The command line under torchrun: one answer, one display, one message."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from psutil import Process
from safetensors.torch import load_file, save_file

from steelyard.demo import calibration_texts, model_folder

SAMPLES = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "calibration.jsonl"
    lines = [json.dumps({"text": text[:800]}) for text in calibration_texts(SAMPLES, 0)]
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def command_for(
    model: Path, text: Path, output: Path, ranks: int, *more: str
) -> tuple[list[str], dict[str, str]]:
    """Return a command that quantizes with so many ranks, and its environment."""
    command = ["-m", "steelyard", "quantize", str(model), "-o", str(output)]
    command += more or ["--scheme", "FP8"]
    command += ["--data", str(text), "--samples", str(SAMPLES), "--max-seq-length", "64"]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [*torchrun, "--master-port", port, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return [sys.executable, *command], environment


def quantize(model: Path, text: Path, output: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    command, environment = command_for(model, text, output, ranks)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_two_ranks_write_what_one_process_writes(text: Path, tmp_path: Path) -> None:
    alone = quantize(model_folder(), text, tmp_path / "alone", 1)
    assert alone.returncode == 0, alone.stderr
    both = quantize(model_folder(), text, tmp_path / "both", 2)
    assert both.returncode == 0, both.stderr
    for file in sorted((tmp_path / "alone").iterdir()):
        if not file.name.startswith("report."):  # which tells the time
            assert (tmp_path / "both" / file.name).read_bytes() == file.read_bytes(), file.name
    # the first rank alone speaks
    assert both.stdout.splitlines()[0] == alone.stdout.splitlines()[0]
    assert len(both.stdout.splitlines()) == len(alone.stdout.splitlines())


def test_a_bad_sample_ends_all_with_one_message(text: Path, tmp_path: Path) -> None:
    """One text has a token that the model turns into NaN, so one rank meets it."""
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    shutil.copytree(model_folder(), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in text.read_text("utf-8").splitlines()]
    ids = [set(tokenizer(t)["input_ids"][:64]) for t in texts]
    alone_in = {i: ids[i] - set().union(*(ids[:i] + ids[i + 1 :])) for i in range(len(ids))}
    bad = next(iter(next(tokens for tokens in alone_in.values() if tokens)))
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][bad] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})

    both = quantize(model, text, tmp_path / "out", 2)
    assert both.returncode != 0
    said = [line for line in both.stderr.splitlines() if line.startswith("error")]
    assert len(said) == 1, both.stderr
    assert "NaN" in said[0] or "non-finite" in said[0]
    assert not (tmp_path / "out").exists()


def test_a_killed_rank_is_named(text: Path, tmp_path: Path) -> None:
    """torchrun ends the others at once, while they find out who is missing."""
    gptq = ["--scheme", "W4A16", "--gptq"]
    command, environment = command_for(model_folder(), text, tmp_path / "out", 3, *gptq)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as torchrun:
        while not (tmp_path / ".out.steelyard").exists():
            assert torchrun.poll() is None
            time.sleep(0.01)
        ranks = {child.environ().get("RANK"): child for child in Process(torchrun.pid).children()}
        ranks["1"].kill()
        _, err = torchrun.communicate(timeout=300)
    assert torchrun.returncode != 0
    said = [line for line in err.splitlines() if line.startswith("error")]
    assert said, err
    assert all("rank 1 does not answer" in line for line in said), said
