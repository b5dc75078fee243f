"""reproduce: the same bytes from the recorded recipe; sign: a signature that notices any change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands import Command
from damages import flip


def test_reproduce(steelyard: Command, model: Path, workplace: Path, tmp_path: Path) -> None:
    folder, data = tmp_path / "q", workplace / "calibration.txt"
    made = ("--scheme", "FP8", "--data", data, "--samples", 8, "--max-seq-length", 32)
    assert steelyard("quantize", model, "-o", folder, *made).code == 0
    same = steelyard("reproduce", folder, "--base", model, "--data", data)
    assert same.code == 0, same.err
    assert "is reproduced: " in same.out and not list(tmp_path.glob(".reproduce-*"))
    assert steelyard("reproduce", folder, "--base", model).code == 2  # the run used data
    flip("weight", 5, 2, "model.layers.1.mlp.up_proj")(folder)
    damaged = steelyard("reproduce", folder, "--base", model, "--data", data)
    assert damaged.code == 1
    assert "problem: model.layers.1.mlp.up_proj.weight has other bytes" in damaged.out
    (folder / "provenance.json").unlink()
    unknown = steelyard("reproduce", folder, "--base", model)
    assert unknown.code == 1 and "no provenance.json of a run" in unknown.err


def test_sign(steelyard: Command, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing.signing")
    folder, key, public = tmp_path / "q", tmp_path / "key.pem", tmp_path / "public.pem"
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key]
    subprocess.run(make, check=True, capture_output=True)
    show = ["openssl", "ec", "-in", key, "-pubout", "-out", public]
    subprocess.run(show, check=True, capture_output=True)
    assert steelyard("quantize", model, "-o", folder, "--scheme", "W8A8").code == 0
    assert steelyard("sign", folder, "--key", tmp_path / "none.pem").code == 2
    verify = ("sign", folder, "--key", public, "--verify")
    assert "is not signed" in steelyard(*verify).out
    signed = steelyard("sign", folder, "--key", key)
    assert signed.code == 0, signed.err
    assert steelyard(*verify).code == 0
    (folder / "report.html").write_text("may change")
    assert steelyard(*verify).code == 0
    assert steelyard("doctor", folder).code == 0  # the signature is no extra file
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config + " ")
    changed = steelyard(*verify)
    assert changed.code == 1 and "config.json" in changed.out
    assert steelyard("sign", folder, "--key", public).code == 1  # not a private key
