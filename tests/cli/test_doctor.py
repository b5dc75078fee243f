"""doctor: findings with remedies, exit code 1 for an error, and a repaired copy."""

from __future__ import annotations

from pathlib import Path

from commands import Command
from damages import weights


def test_findings_and_repair(steelyard: Command, model: Path, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    assert steelyard("quantize", model, "-o", bad, "--scheme", "W4A16").code == 0
    fine = steelyard("doctor", bad, "--base", model)
    assert (fine.code, fine.err) == (0, "")
    assert "layers of vLLM: 12 WNA16, 2 unquantized" in fine.out
    assert fine.out.splitlines()[-1] == f"{bad}: no finding, 21 quantized modules"
    weights(group_size=32)(bad)
    found = steelyard("doctor", bad, "--json")
    assert found.code == 1
    assert {f["severity"] for f in found.document["findings"]} == {"error"}
    assert all(f["remedy"] for f in found.document["findings"])
    assert "  remedy: " in steelyard("doctor", bad).out
    fixed = steelyard("doctor", bad, "--repair", good, "--base", model)
    assert fixed.code == 0, fixed.out
    assert "repaired: config_groups.group_0.weights.group_size: 32 -> 128" in fixed.out
    assert fixed.out.splitlines()[-1] == f"{good}: no finding, 21 quantized modules"
    again = steelyard("doctor", bad, "--repair", good)
    assert again.code == 1 and "not empty" in again.err


def test_tensor_parallelism(steelyard: Command, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "W4A16").code == 0
    assert steelyard("doctor", folder, "--json").document["tensor_parallel"] == [1]
    split = steelyard("doctor", folder, "--tensor-parallel", 2)
    assert split.code == 1
    assert "error: model.layers.{0-2}.self_attn.o_proj: 128 columns in units of 128" in split.out


def test_full_needs_a_base(steelyard: Command, model: Path) -> None:
    assert steelyard("doctor", model, "--full").code == 2


def test_a_plain_model(steelyard: Command, model: Path, tmp_path: Path) -> None:
    plain = steelyard("doctor", model)
    assert plain.code == 1 and "so the model is not quantized" in plain.out
    assert steelyard("doctor", model, "--repair", tmp_path / "out").code == 1
    assert not (tmp_path / "out").exists()
