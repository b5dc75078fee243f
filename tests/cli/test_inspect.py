"""inspect: what is shown is what the files hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import Command
from families import read
from safetensors.torch import save_file

from steelyard import oneshot
from steelyard.checkpoint import Shards
from steelyard.modifiers import QuantizationModifier


@pytest.fixture(scope="module")
def quantized(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "q"
    recipe = QuantizationModifier(scheme="W4A16", ignore=["lm_head"])
    oneshot(workplace / "path" / "to" / "model", recipe, output_dir=folder)
    return folder


def test_modules_share_a_line_and_totals_are_right(steelyard: Command, quantized: Path) -> None:
    answer = steelyard("inspect", quantized)
    lines = answer.out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["model.layers.{0-2}.self_attn.q_proj"][:4] == ["3", "int4", "g128", "128x128"]
    assert rows["lm_head"][:3] == ["1", "bf16", "128x128"]
    scales = torch.cat(
        [
            tensor.double().flatten()
            for name, tensor in read(quantized).items()
            if name.endswith("mlp.up_proj.weight_scale")
        ]
    )
    low, _, high = rows["model.layers.{0-2}.mlp.up_proj.weight_scale"]
    assert low == f"{float(scales.min()):.3g}" and high == f"{float(scales.max()):.3g}"
    assert "(21 pack-quantized)" in lines[-1]
    assert len(lines) < 35


def test_document_agrees_with_the_files(process: Command, quantized: Path, workplace: Path) -> None:
    found = process("inspect", quantized, "--json").document
    source = Shards(workplace / "path" / "to" / "model")
    assert found["schema"] == 1
    assert found["weights"] == sum(torch.Size(source.info(n).shape).numel() for n in source)
    assert found["bytes"] == Shards(quantized).total_bytes
    assert found["bits_per_weight"] == 8 * found["bytes"] / found["weights"]
    module = found["modules"]["model.layers.1.mlp.down_proj"]
    assert (module["type"], module["format"]) == ("int4 group 128", "pack-quantized")
    assert module["shape"] == [128, 256]
    stored = read(quantized)["model.layers.1.mlp.down_proj.weight_scale"].double()
    scale = module["scales"]["weight_scale"]
    assert scale["median"] == float(stored.median())
    assert scale["count"] == stored.numel()
    assert (scale["non_finite"], scale["zero"]) == (0, 0)
    assert scale["negative"] == int((stored < 0).sum())


def test_filter_that_would_never_end(steelyard: Command, quantized: Path) -> None:
    answer = steelyard("inspect", quantized, "--filter", r"re:(?:(?:.|..)+)+\d\d\d")
    assert answer.code == 2 and "takes longer than 2 s" in answer.err
    answer = steelyard("inspect", quantized, "--filter", "re:(")
    assert answer.code == 2 and "is not a regular expression" in answer.err


def test_all_and_filter(steelyard: Command, quantized: Path) -> None:
    answer = steelyard("inspect", quantized, "--all", "--filter", "model.layers.1.*o_proj")
    names = {line.split()[0] for line in answer.out.splitlines() if ".o_proj." in line}
    stored = {n for n in read(quantized) if n.startswith("model.layers.1.self_attn.o_proj.")}
    assert names == stored
    fewer = steelyard("inspect", quantized, "--filter", "re:model.layers.0", "--json").document
    assert all(name.startswith("model.layers.0.") for name in fewer["modules"])
    assert len(fewer["modules"]) == 9
    without = steelyard("inspect", quantized, "--no-scales", "--json").document
    assert not any(module["scales"] for module in without["modules"].values())


def test_bad_scales_are_counted(steelyard: Command, quantized: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(quantized, broken)
    tensors = read(broken)
    tensors["model.layers.0.mlp.up_proj.weight_scale"][0] = torch.nan
    tensors["model.layers.2.mlp.up_proj.weight_scale"][1] = 0
    save_file(tensors, broken / "model.safetensors")
    answer = steelyard("inspect", broken)
    row = next(line for line in answer.out.splitlines() if "up_proj.weight_scale" in line)
    assert row.split()[-1] == "2"
    assert "2 scales are zero or not finite" in answer.out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "is not an object"),
        ('{"quantization_config": {"quant_method": "compressed-tensors", "x": 1}}', "config"),
        (None, "is not there"),
    ],
)
def test_unusable_config_is_told_and_the_files_are_shown(
    content: str | None, said: str, steelyard: Command, quantized: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(quantized, broken)
    (broken / "config.json").unlink()
    if content is not None:
        (broken / "config.json").write_text(content)
    answer = steelyard("inspect", broken, "--json")
    assert answer.code == 0, answer.err
    assert said in answer.document["problems"][0]
    assert "model.layers.0.mlp.up_proj" in answer.document["modules"]
    assert "problem: " in steelyard("inspect", broken).out


def test_files_that_contradict_themselves_are_refused(
    steelyard: Command, quantized: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(quantized, broken)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    answer = steelyard("inspect", broken)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith("error: ") and answer.err.count("\n") == 1


def test_formats_of_others_have_no_bits_per_weight(steelyard: Command, tmp_path: Path) -> None:
    save_file(
        {"a.qweight": torch.zeros(8, 8, dtype=torch.int32), "a.scales": torch.ones(2, 8)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "x", "quantization_config": {"quant_method": "gptq"}})
    )
    found = steelyard("inspect", tmp_path, "--json").document
    assert found["quantization"] == "gptq"
    assert found["bits_per_weight"] is None
    assert found["modules"]["a.scales"]["scales"]["scales"]["maximum"] == 1.0
