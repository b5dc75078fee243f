"""validate: exit code 1 and the list of problems, 0 and one line where there are none."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
import torch
from commands import Command
from families import read
from safetensors.torch import save_file

from steelyard.checkpoint import validate_checkpoint


def test_good_and_damaged(
    steelyard: Command, process: Command, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "NVFP4A16").code == 0
    good = steelyard("validate", folder, "--source", model)
    assert (good.code, good.err) == (0, "")
    *extent, verdict = good.out.splitlines()
    assert verdict == f"{folder} is valid: 21 quantized modules checked, against {model}"
    assert re.fullmatch(r"compared digests of \d+ files, .*", extent[0])
    assert extent[1:] == ["decoded all 3,072 rows of quantized weights"]
    tensors = read(folder)
    tensors["model.layers.1.self_attn.k_proj.weight_global_scale"] *= 2
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    bad = process("validate", "q", "--json")
    assert bad.code == 1
    problems = bad.document["problems"]
    assert set(validate_checkpoint(folder)) < set(problems)
    assert any("model.safetensors was changed after the run" in problem for problem in problems)
    assert any("up_proj.weight_scale is missing" in problem for problem in problems)
    assert any("fused partner" in problem for problem in problems)


def test_in_process(steelyard: Command, model: Path, tmp_path: Path) -> None:
    plain = steelyard("validate", model)
    assert plain.code == 1
    assert "so the model is not quantized" in plain.out
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "W8A8").code == 0
    tensors = read(folder)
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    by_digest = steelyard("validate", folder)
    assert by_digest.code == 1
    assert "model.safetensors was changed after the run: model.norm.weight differs" in by_digest.out
    (folder / "provenance.json").unlink()
    alone = steelyard("validate", folder)
    assert alone.code == 0 and alone.out.startswith("note: no provenance.json")
    answer = steelyard("validate", folder, "--source", model)
    assert answer.code == 1
    assert "problem: model.norm.weight is not quantized, but its values differ" in answer.out
    assert "1 problem in" in answer.out


def test_negative_scales_that_were_asked_for_are_good(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "QuantizationModifier:\n  scheme: W4A16\n  ignore: [lm_head]\n"
        "  weight_observer: {name: optimal, negative_scales: true}\n"
    )
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--recipe", recipe).code == 0
    scales = [t for n, t in read(folder).items() if n.endswith("weight_scale")]
    assert any(bool((scale < 0).any()) for scale in scales), "else this shows nothing"
    assert all(bool(torch.isfinite(scale).all()) for scale in scales)
    assert steelyard("validate", folder).code == 0


def test_quantized_embedding_that_the_head_shares(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    """Made of an untied model, since a plan refuses a tied one."""
    folder = tmp_path / "q"
    targets = ["--targets", "model.embed_tokens"]
    answer = steelyard("quantize", model, "-o", folder, "--scheme", "W8A16", *targets)
    assert answer.code == 0, answer.err
    assert steelyard("validate", folder).code == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = {name: tensor for name, tensor in read(folder).items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    answer = steelyard("validate", folder)
    assert answer.code == 1
    assert "model.embed_tokens is quantized and shares its weight with lm_head" in answer.out


def test_a_comment_does_not_allow_negative_scales(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    folder, given = tmp_path / "q", tmp_path / "recipe.yaml"
    given.write_text(
        "modifiers:\n  QuantizationModifier:\n    scheme: W4A16\n    ignore: [lm_head]\n"
        "    weight_observer: {name: optimal, negative_scales: false}\n"
    )
    assert steelyard("quantize", model, "-o", folder, "--recipe", given).code == 0
    tensors = read(folder)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    assert bool((tensors[name] > 0).all())
    tensors[name] = -tensors[name]
    save_file(tensors, folder / "model.safetensors")
    (folder / "provenance.json").unlink()
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text() + "\n# negative_scales: true\n")
    answer = steelyard("validate", folder, "--json")
    assert answer.code == 1
    assert any(p.startswith(f"{name} has") and "negative" in p for p in answer.document["problems"])


def test_full_and_sample(
    steelyard: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample misses one code among rows that it does not decode; --full finds it."""
    monkeypatch.setattr("steelyard.checkpoint.against_source.SAMPLE", 1)
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "W4A16").code == 0
    for name in ("provenance.json", "report.json"):
        (folder / name).unlink()
    name = "model.layers.0.mlp.up_proj.weight_packed"
    tensors = read(folder)
    tensors[name][100, 0] ^= 0x77777777  # of 256 rows; the sample has the first and last 32
    save_file(tensors, folder / "model.safetensors")
    some = steelyard("validate", folder, "--source", model, "--json")
    assert some.code == 0
    assert some.document["decoded"] == {"rows": 1344, "of": 3072}
    assert some.document["digests"] is None
    everything = steelyard("validate", folder, "--source", model, "--full")
    assert everything.code == 1
    assert f"{name.removesuffix('_packed')} has " in everything.out
    assert "more than 2 steps from the source" in everything.out
    assert steelyard("validate", folder, "--full").code == 2


def test_provenance_that_cannot_be_used(steelyard: Command, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "W8A16").code == 0
    path = folder / "provenance.json"
    content = json.loads(path.read_text())
    predicate = content["predicate"]
    predicate["steelyard"]["files"]["../outside"] = {"bytes": 1}
    outside = {"name": "../outside", "algorithm": "sha256", "digest": 64 * "0"}
    predicate["resources"].insert(0, outside)
    path.write_text(json.dumps(content))
    assert (
        "the digest of its subject is not that of its resources"
        in steelyard("validate", folder).out
    )
    root = hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in predicate["resources"]))
    content["subject"][0]["digest"]["sha256"] = root.hexdigest()
    path.write_text(json.dumps(content))
    answer = steelyard("validate", folder)
    assert answer.code == 1
    assert "lists '../outside', which is not a file of this folder" in answer.out
    predicate["steelyard"]["schema_version"] = 3
    newer = json.dumps(content)
    for text in ("{", '{"schema_version": 2}', '{"_type": 1}', "[]", newer):
        path.write_text(text)
        answer = steelyard("validate", folder)
        assert answer.code == 1 and "provenance.json" in answer.out


def test_files_beside_a_checkpoint(steelyard: Command, model: Path, tmp_path: Path) -> None:
    """Only a model's own are looked at; a pipe is a problem, and is not waited for."""
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "W8A16").code == 0
    (folder / "README.md").write_text("mine")
    (folder / "notes.json").write_text("// no JSON")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    answer = steelyard("validate", folder, "--source", model)
    assert answer.code == 0
    assert answer.out.startswith("note: chat_template.jinja was added after the run\ncompared")
    for name in ("vocab.json", "pipe.json"):
        os.mkfifo(folder / name)
        answer = steelyard("validate", folder)
        assert answer.code == 1
        assert f"{name} is " in answer.out and "pipe" in answer.out
        (folder / name).unlink()
