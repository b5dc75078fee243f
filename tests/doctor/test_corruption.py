"""Damages finished checkpoints of every format, and counts what the doctor finds.

Each row says what is needed to find the damage, beside the digests, which find everything:

    alone - the files of the checkpoint, without digests, report and recipe
    base  - the base model beside them
    run   - the digests or the report of the run: nothing else knows the value
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import damages as d
import pytest
import torch

pytest.importorskip("transformers")

from damages import GATE, UP, K, Q
from families import small_model, token_batches

from steelyard import oneshot
from steelyard.doctor import examine
from steelyard.modifiers import QuantizationModifier

KNOWN_OF_RUN = ("provenance.json", "report.json", "report.html", "recipe.yaml")
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
STATIC = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
}
RECIPES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name} for name in ("W4A16", "W4A16_ASYM", "W8A16", "W8A8")},
    **{name: {"scheme": name} for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16")},
    **{name: {"scheme": name} for name in ("NVFP4", "MXFP4", "MXFP8")},
    "W8A8_STATIC": {"config_groups": {"group_0": STATIC}},
    "KV": {"scheme": "W4A16", "kv_cache_scheme": CACHE},
}
CALIBRATED = ("FP8", "NVFP4", "W8A8_STATIC", "KV")


class Made(NamedTuple):
    base: Path
    checkpoints: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("corruption")
    model = small_model("qwen2", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    for number, parameter in enumerate(model.parameters()):  # norms and biases start alike
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(number)
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    for name, options in RECIPES.items():
        data = {"dataset": token_batches()} if name in CALIBRATED else {}
        recipe = QuantizationModifier(ignore=["lm_head"], **options)
        oneshot(str(folder / "base"), recipe, output_dir=folder / name, **data)
    return Made(folder / "base", {name: folder / name for name in RECIPES})


ALL = list(RECIPES)
PACKED = ["W4A16", "W4A16_ASYM", "W8A16", "KV"]
NIBBLES = ["W4A16", "W4A16_ASYM", "NVFP4A16", "NVFP4", "MXFP4"]
EXPONENTS = ["MXFP4", "MXFP8"]
FLOAT_SCALES = ["W4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"]
STATICS = ["FP8", "W8A8_STATIC"]
NORM = "model.norm.weight"
CACHE_OF = "model.layers.1.self_attn"
ZERO_POINT = torch.zeros(16, 1, dtype=torch.int32)

TABLE: list[tuple[str, list[str], d.Damage, str]] = [
    # -- codes
    (
        "low bit of a code",
        ["W4A16", "FP8"],
        d.codes(lambda c: c ^ (torch.arange(c.numel()).view_as(c) == 9)),
        "run",
    ),
    ("codes random", ALL, d.codes(d.random_bytes), "base"),
    ("codes of gate and up swapped", ["W4A16", "FP8", "NVFP4"], d.tensors(d.swap_codes), "base"),
    ("gate and up swapped", ["W4A16_ASYM", "W8A8", "MXFP4"], d.swap(GATE, UP), "base"),
    ("layers swapped", ["W8A16", "MXFP8"], d.swap("model.layers.0", "model.layers.1"), "base"),
    ("a neighbour's weights", ALL, d.tensors(d.copy_module), "alone"),
    ("rows rolled", ["W4A16", "W8A8", "MXFP8"], d.codes(lambda c: c.roll(1, 0)), "base"),
    ("columns rolled", ["W8A8", "FP8_DYNAMIC"], d.codes(lambda c: c.roll(1, 1)), "base"),
    ("half of the codes zero", ["W4A16", "FP8", "NVFP4A16"], d.codes(d.zero_half), "base"),
    ("nibbles reversed", NIBBLES, d.codes(d.nibbles), "base"),
    ("bytes of words reversed", PACKED, d.codes(d.reversed_words), "base"),
    ("codes transposed", ["W8A8", "FP8"], d.codes(lambda c: c.T), "base"),
    ("codes inverted", ["W8A8", "W8A16"], d.codes(lambda c: ~c), "base"),
    ("codes missing", ["W4A16", "NVFP4"], d.drop(f"{Q}.weight_packed"), "alone"),
    ("codes of bytes missing", ["W8A8", "FP8"], d.drop(f"{Q}.weight"), "alone"),
    ("codes as another integer", ["W8A8"], d.cast("weight", torch.int16), "alone"),
    ("codes as bf16", ["FP8", "FP8_BLOCK"], d.cast("weight", torch.bfloat16), "alone"),
    ("words as 64 bits", ["W4A16"], d.cast("weight_packed", torch.int64), "alone"),
    # -- scales
    ("top bit of a scale", ["W4A16", "W8A8"], d.flip("weight_scale", 3, 6), "alone"),
    ("top bit of an exponent", EXPONENTS, d.flip("weight_scale", 0, 7), "alone"),
    ("low bit of a scale", ["W4A16", "NVFP4"], d.flip("weight_scale", 0, 0), "run"),
    ("scale zero", FLOAT_SCALES, d.first("weight_scale", 0.0), "alone"),
    ("scale NaN", FLOAT_SCALES, d.first("weight_scale", float("nan")), "alone"),
    ("exponent NaN", EXPONENTS, d.first("weight_scale", 255), "alone"),
    ("scale infinite", ["W4A16", "W8A8", "FP8"], d.first("weight_scale", float("inf")), "alone"),
    ("scale negative", ["W8A8", "FP8_DYNAMIC", "NVFP4"], d.first("weight_scale", -1.0), "alone"),
    ("scales doubled", ["W4A16", "W8A8", "FP8_BLOCK", "MXFP4"], d.times("weight_scale", 2), "base"),
    (
        "scales rolled",
        ["W8A8", "W8A16"],
        d.value("weight_scale", lambda s: s.roll(1, 0) * 1.5),
        "base",
    ),
    (
        "scales of another module",
        ["W8A8", "FP8_BLOCK"],
        d.swap(Q, "model.layers.1.self_attn.o_proj", "weight_scale"),
        "run",
    ),
    ("scale missing", ALL, d.drop(f"{Q}.weight_scale"), "alone"),
    ("scale in fp16", ["W4A16", "FP8"], d.cast("weight_scale", torch.float16), "alone"),
    (
        "scale of another shape",
        ["W4A16", "NVFP4"],
        d.value("weight_scale", lambda s: s[:-1]),
        "alone",
    ),
    ("weight_shape turned", ["W4A16"], d.value("weight_shape", lambda s: s.flip(0), GATE), "alone"),
    ("weight_shape missing", ["W4A16", "W8A16"], d.drop(f"{Q}.weight_shape"), "alone"),
    ("zero point missing", ["W4A16_ASYM"], d.drop(f"{Q}.weight_zero_point"), "alone"),
    ("all zero points missing", ["W4A16_ASYM"], d.drop_leaf("weight_zero_point"), "alone"),
    (
        "zero points random",
        ["W4A16_ASYM"],
        d.value("weight_zero_point", lambda z: d.random_bytes(d.raw(z)).view(torch.int32)),
        "base",
    ),
    ("extra zero point", ["W4A16", "W8A16"], d.add(f"{Q}.weight_zero_point", ZERO_POINT), "alone"),
    (
        "extra plain weight",
        ["W4A16", "MXFP4"],
        d.add(f"{Q}.weight", torch.zeros(128, 128)),
        "alone",
    ),
    ("extra input_scale", ["W4A16", "W8A8"], d.add(f"{Q}.input_scale", torch.ones(1)), "alone"),
    (
        "global scale of k differs",
        ["NVFP4", "NVFP4A16"],
        d.times("weight_global_scale", 2, K),
        "alone",
    ),
    ("global scale missing", ["NVFP4", "NVFP4A16"], d.drop(f"{Q}.weight_global_scale"), "alone"),
    ("global scale zero", ["NVFP4"], d.first("weight_global_scale", 0.0), "alone"),
    # -- activations and cache
    ("input_scale missing", STATICS, d.drop(f"{Q}.input_scale"), "alone"),
    ("all input_scales missing", STATICS, d.drop_leaf("input_scale"), "alone"),
    ("input_scale zero", STATICS, d.first("input_scale", 0.0), "alone"),
    (
        "input_scale huge",
        STATICS,
        d.first("input_scale", 1e30, GATE.replace("gate", "down")),
        "alone",
    ),
    ("input_scale x 100", ["W8A8_STATIC"], d.times("input_scale", 100), "run"),
    ("input_scale of k differs", ["FP8"], d.times("input_scale", 2, K), "alone"),
    ("input_global_scale missing", ["NVFP4"], d.drop(f"{Q}.input_global_scale"), "alone"),
    ("input_global_scale of up differs", ["NVFP4"], d.times("input_global_scale", 2, UP), "alone"),
    ("k_scale missing", ["KV"], d.drop(f"{CACHE_OF}.k_scale"), "alone"),
    (
        "cache scales of a layer missing",
        ["KV"],
        d.drop(f"{CACHE_OF}.k_scale", f"{CACHE_OF}.v_scale"),
        "alone",
    ),
    ("v_scale NaN", ["KV"], d.first("v_scale", float("nan"), CACHE_OF), "alone"),
    ("k_scale negative", ["KV"], d.first("k_scale", -1.0, CACHE_OF), "alone"),
    ("k_scale x 100", ["KV"], d.times("k_scale", 100, CACHE_OF), "run"),
    # -- unquantized tensors
    ("bit of a norm", ["W4A16", "FP8"], d.flip("weight", 3, 1, "model.norm"), "base"),
    ("norm in fp16", ["W4A16"], d.cast("weight", torch.float16, "model.norm"), "base"),
    ("norm missing", ["NVFP4"], d.drop(NORM), "base"),
    ("bias missing", ["W8A8"], d.drop(f"{Q}.bias"), "base"),
    (
        "embedding rolled",
        ["MXFP8"],
        d.value("weight", lambda w: w.roll(1, 0), "model.embed_tokens"),
        "base",
    ),
    # -- config
    ("group_size halved", ["W4A16", "W8A16"], d.weights(group_size=64), "alone"),
    ("group_size of NVFP4", ["NVFP4"], d.weights(group_size=32), "alone"),
    ("num_bits", ["W4A16", "W8A16"], d.weights(num_bits=6), "alone"),
    ("symmetric", ["W4A16", "FP8_DYNAMIC"], d.weights(symmetric=False), "alone"),
    ("asymmetric as symmetric", ["W4A16_ASYM"], d.weights(symmetric=True), "alone"),
    ("channel as tensor", ["W8A8", "FP8_DYNAMIC"], d.weights(strategy="tensor"), "alone"),
    ("integers as floats", ["W8A8"], d.weights(type="float"), "alone"),
    ("block_structure", ["FP8_BLOCK"], d.weights(block_structure=[64, 64]), "alone"),
    ("actorder without g_idx", ["W4A16"], d.weights(actorder="group"), "alone"),
    (
        "format",
        ["W4A16", "FP8"],
        d.group(
            lambda g: g.update(
                format="int-quantized" if g["weights"]["num_bits"] == 4 else "pack-quantized"
            )
        ),
        "alone",
    ),
    (
        "format mixed, none of the group",
        ["W8A8"],
        d.quantization(
            lambda c: (
                c.update(format="mixed-precision"),
                c["config_groups"]["group_0"].update(format=None),
            )
        ),
        "alone",
    ),
    (
        "input_activations removed",
        ["FP8", "NVFP4", "W8A8"],
        d.group(lambda g: g.update(input_activations=None)),
        "alone",
    ),
    (
        "static inputs as dynamic",
        ["FP8"],
        d.group(lambda g: g["input_activations"].update(dynamic=True)),
        "alone",
    ),
    (
        "dynamic inputs as static",
        ["FP8_DYNAMIC"],
        d.group(lambda g: g["input_activations"].update(dynamic=False, strategy="tensor")),
        "alone",
    ),
    (
        "inputs in 4 bits",
        ["W8A8"],
        d.group(lambda g: g["input_activations"].update(num_bits=4)),
        "alone",
    ),
    (
        "head no longer ignored",
        ["W4A16", "NVFP4"],
        d.quantization(lambda c: c.update(ignore=[])),
        "alone",
    ),
    (
        "quantized module ignored",
        ["W4A16", "FP8"],
        d.quantization(lambda c: c["ignore"].append(Q)),
        "alone",
    ),
    (
        "all modules ignored",
        ["W8A8"],
        d.quantization(lambda c: c["ignore"].append("re:.*")),
        "alone",
    ),
    (
        "target of another class",
        ["W4A16"],
        d.group(lambda g: g.update(targets=["Conv2d"])),
        "alone",
    ),
    (
        "targets of some names",
        ["FP8"],
        d.group(lambda g: g.update(targets=["re:.*v_proj"])),
        "alone",
    ),
    ("no groups", ["NVFP4"], d.quantization(lambda c: c.update(config_groups={})), "alone"),
    (
        "no quantization_config",
        ["MXFP4"],
        d.config(lambda c: c.pop("quantization_config")),
        "alone",
    ),
    ("quant_method gone", ["W4A16"], d.quantization(lambda c: c.pop("quant_method")), "alone"),
    (
        "status frozen",
        ["W4A16"],
        d.quantization(lambda c: c.update(quantization_status="frozen")),
        "alone",
    ),
    (
        "sparsity targets",
        ["W4A16"],
        d.quantization(
            lambda c: c.update(sparsity_config={"format": "dense", "targets": ["Linear"]})
        ),
        "alone",
    ),
    (
        "cache scheme gone",
        ["KV"],
        d.quantization(lambda c: c.update(kv_cache_scheme=None)),
        "alone",
    ),
    (
        "cache of 4 bits",
        ["KV"],
        d.quantization(lambda c: c["kv_cache_scheme"].update(num_bits=4)),
        "alone",
    ),
    ("fewer layers", ["W4A16"], d.setting("num_hidden_layers", 1), "alone"),
    ("hidden_size", ["FP8"], d.setting("hidden_size", 64), "alone"),
    ("vocab_size", ["W8A8"], d.setting("vocab_size", 256), "alone"),
    ("rms_norm_eps", ["W4A16"], d.setting("rms_norm_eps", 1.0), "base"),
    ("architecture", ["W4A16"], d.setting("architectures", ["LlamaForCausalLM"]), "base"),
    ("config cut", ["W4A16"], d.cut("config.json"), "alone"),
    # -- files
    ("weights cut", ["W4A16", "FP8"], d.cut("model.safetensors"), "alone"),
    ("last byte missing", ["NVFP4"], d.cut("model.safetensors", 0.99999), "alone"),
    ("weights empty", ["W8A8"], d.replace("model.safetensors", b""), "alone"),
    (
        "pointer of git-lfs",
        ["W8A8"],
        d.replace("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n" * 4),
        "alone",
    ),
    ("bit of the header", ["W4A16"], d.header_bit, "alone"),
    ("another shard", ["W4A16"], d.extra_shard, "alone"),
    ("tokenizer cut", ["W4A16"], d.cut("tokenizer.json"), "alone"),
    ("shards swapped", ["W4A16"], d.sharded(d.swap_shards), "alone"),
    ("shard missing", ["FP8"], d.sharded(d.lose_shard), "alone"),
    ("index with the wrong shard", ["W4A16", "NVFP4"], d.index(d.wrong_shard), "alone"),
    ("index without a tensor", ["W8A8"], d.index(lambda m: m.pop(next(iter(m)))), "alone"),
    (
        "index with another tensor",
        ["W8A8"],
        d.index(lambda m: m.update(other=next(iter(m.values())))),
        "alone",
    ),
]
ROWS = [
    pytest.param(scheme, damage, needs, id=f"{name}-{scheme}".replace(" ", "_"))
    for name, schemes, damage, needs in TABLE
    for scheme in schemes
]


def copy_of(good: Path, folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Return a copy of a checkpoint whose files are links; a damage replaces them."""
    ignored = shutil.ignore_patterns(*without)
    return Path(shutil.copytree(good, folder, copy_function=os.link, ignore=ignored))


def test_the_table_is_wide() -> None:
    assert len({name for name, *_ in TABLE}) >= 100
    assert {scheme for _, schemes, *_ in TABLE for scheme in schemes} == set(RECIPES)


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("scheme", RECIPES)
def test_undamaged(made: Made, tmp_path: Path, scheme: str, known: bool, with_base: bool) -> None:
    folder = copy_of(made.checkpoints[scheme], tmp_path / "q", () if known else KNOWN_OF_RUN)
    found = examine(folder, made.base if with_base else None)
    assert found.findings.found == []
    assert found.findings.modules == 14
    assert {each.scheme for each in found.served} > {"unquantized"}


@pytest.mark.parametrize(("scheme", "damage", "needs"), ROWS)
def test_damage_is_found(
    made: Made, tmp_path: Path, scheme: str, damage: d.Damage, needs: str
) -> None:
    whole = copy_of(made.checkpoints[scheme], tmp_path / "whole")
    damage(whole)
    found = examine(whole).findings
    assert found.problems, "not found by the digests"
    assert all(finding.remedy for finding in found.found)
    bare = copy_of(whole, tmp_path / "bare", KNOWN_OF_RUN)
    if needs != "run":
        assert examine(bare, made.base).findings.found, "not found with the base model"
    if needs == "alone":
        assert examine(bare).findings.found, "not found by the files alone"


def test_one_high_bit_is_found_with_recipe_and_base(made: Made, tmp_path: Path) -> None:
    """Rounded to nearest, no code may be several steps away."""
    whole = copy_of(made.checkpoints["W8A8"], tmp_path / "q", KNOWN_OF_RUN[:3])
    d.flip("weight", 300, 6)(whole)
    found = examine(whole, made.base, full=True).findings
    assert [f.check for f in found.found] == ["weight"] and Q in found.problems[0]
