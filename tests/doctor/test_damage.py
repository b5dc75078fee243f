"""Damage to a finished checkpoint is named: by the digests, by the source, or by the files alone.

Each row of the table alters a good checkpoint that a run wrote, and says who must notice:

    source  - with the source at hand, and neither provenance.json, report.json nor recipe.yaml
    alone   - from config and tensors, with nothing else at hand
    report  - from report.json beside them

With provenance.json every one of them is noticed, whatever it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers")

from damages import Damage, Tensors, config, tensors
from families import small_model, token_batches

from steelyard import oneshot
from steelyard.doctor import validate_folder
from steelyard.modifiers import GPTQModifier, QuantizationModifier

Q = "model.layers.1.self_attn.q_proj"
GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
HELPERS = ("provenance.json", "report.json", "report.html", "recipe.yaml")


def weights(bits: int, **more: Any) -> dict[str, Any]:
    args = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 64, **more}
    return {"group_0": {"targets": ["Linear"], "weights": args}}


FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
W8A8 = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": STATIC,
    }
}
RECIPES: dict[str, tuple[Callable[[], Any], bool]] = {  # and whether it needs data
    "W4A16": (lambda: QuantizationModifier(scheme="W4A16", ignore=["lm_head"]), False),
    "W4A16_ASYM": (lambda: QuantizationModifier(scheme="W4A16_ASYM", ignore=["lm_head"]), False),
    "W8A8": (lambda: QuantizationModifier(config_groups=W8A8, ignore=["lm_head"]), True),
    "FP8": (lambda: QuantizationModifier(scheme="FP8", ignore=["lm_head"]), True),
    "NVFP4": (lambda: QuantizationModifier(scheme="NVFP4", ignore=["lm_head"]), True),
    "KV": (
        lambda: QuantizationModifier(scheme="W4A16", ignore=["lm_head"], kv_cache_scheme=FP8_CACHE),
        True,
    ),
    "GPTQ": (lambda: GPTQModifier(config_groups=weights(4), ignore=["lm_head"]), True),
    "GPTQ-W2": (lambda: GPTQModifier(config_groups=weights(2), ignore=["lm_head"]), True),
    "GPTQ-W3": (lambda: GPTQModifier(config_groups=weights(3), ignore=["lm_head"]), True),
    "GPTQ-asym": (
        lambda: GPTQModifier(config_groups=weights(4, symmetric=False), ignore=["lm_head"]),
        True,
    ),
    "GPTQ-NVFP4": (lambda: GPTQModifier(scheme="NVFP4A16", ignore=["lm_head"]), True),
    "GPTQ-FP8": (lambda: GPTQModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"]), True),
    "W2": (lambda: QuantizationModifier(config_groups=weights(2), ignore=["lm_head"]), False),
    "negative": (
        lambda: QuantizationModifier(
            scheme="W4A16",
            ignore=["lm_head"],
            weight_observer={"name": "optimal", "negative_scales": True},
        ),
        False,
    ),
    "mse": (
        lambda: QuantizationModifier(
            config_groups=weights(3), ignore=["lm_head"], weight_observer="memoryless_mse"
        ),
        False,
    ),
    "imatrix": (
        lambda: QuantizationModifier(
            config_groups=weights(3), ignore=["lm_head"], weight_observer="imatrix_mse"
        ),
        True,
    ),
}


class Made(NamedTuple):
    source: Path
    checkpoints: dict[str, Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("damage")
    source = folder / "source"
    model = small_model("qwen2", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    for name, parameter in model.named_parameters():  # norms and biases start alike
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(source)
    vocabulary = {f"w{i}": i for i in range(128)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary}}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    checkpoints = {}
    for name, (recipe, needs_data) in RECIPES.items():
        data = {"dataset": token_batches()} if needs_data else {}
        oneshot(str(source), recipe(), output_dir=folder / name, **data)
        checkpoints[name] = folder / name
    return Made(source, checkpoints)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("helped", [True, False])
@pytest.mark.parametrize("scheme", RECIPES)
def test_good(made: Made, tmp_path: Path, scheme: str, helped: bool, full: bool) -> None:
    """No alarm, with the run's own files and without."""
    folder = shutil.copytree(made.checkpoints[scheme], tmp_path / "q")
    if not helped:
        remove(folder, *(h for h in HELPERS if scheme != "negative" or h != "recipe.yaml"))
    found = validate_folder(folder, made.source, full)
    assert found.problems == []
    assert found.rows is not None and found.rows.modules == 14
    assert bool(found.notes) != helped  # without digests there is a note, and else none


# -- the table ------------------------------------------------------------------------------------


def random_codes(content: Tensors, only: str = "") -> None:
    generator = torch.Generator().manual_seed(5)
    for name, value in content.items():
        leaf = name.rpartition(".")[2]
        codes = leaf == "weight_packed" or (leaf == "weight" and value.element_size() == 1)
        if codes and only in name:
            raw = torch.randint(0, 256, (value.nbytes,), dtype=torch.uint8, generator=generator)
            if value.dtype == torch.float8_e4m3fn:
                raw[(raw & 0x7F) == 0x7F] = 0  # no NaN
            content[name] = raw.view(value.dtype).reshape(value.shape)


def swap(content: Tensors, first: str, second: str) -> None:
    for name in [name for name in content if name.startswith(f"{first}.")]:
        other = name.replace(first, second, 1)
        content[name], content[other] = content[other], content[name]


def each(leaf: str, change: Callable[[torch.Tensor], torch.Tensor], only: str = "") -> Damage:
    def apply(content: Tensors) -> None:
        names = [name for name in content if name.endswith(f".{leaf}") and only in name]
        assert names, f"no {leaf} to damage"
        for name in names:
            content[name] = change(content[name]).to(content[name].dtype).contiguous()

    return tensors(apply)


def reverse_nibbles(value: torch.Tensor) -> torch.Tensor:
    raw = value.contiguous().view(torch.uint8)
    return ((raw >> 4) | (raw << 4)).view(value.dtype)


def random_like(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    raw = torch.randint(0, 256, (value.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(value.dtype).reshape(value.shape)


def roll(value: torch.Tensor) -> torch.Tensor:
    if value.element_size() == 1:
        return value.view(torch.uint8).roll(1, 0).view(value.dtype)
    return value.roll(1, 0)


def flip_bit(value: torch.Tensor) -> torch.Tensor:
    raw = value.clone().view(torch.uint8)
    raw.view(-1)[3] ^= 1
    return raw.view(value.dtype)


def extra_shard(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(128)}, folder / "more.safetensors")


def truncate(name: str) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def group(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return config(lambda c: change(c["quantization_config"]["config_groups"]["group_0"]))


def drop(*names: str) -> Damage:
    def apply(content: Tensors) -> None:
        for name in names:
            del content[name]

    return tensors(apply)


def set_value(key: str, value: Any) -> Damage:
    return config(lambda c: c.update({key: value}))


INT4 = ["W4A16", "W4A16_ASYM", "GPTQ", "GPTQ-asym"]
LOW = ["W2", "GPTQ-W2", "GPTQ-W3", "mse", "imatrix"]
FLOATS = ["NVFP4", "GPTQ-NVFP4", "FP8", "GPTQ-FP8"]
ALL = [*INT4, *LOW, *FLOATS, "W8A8", "KV"]
SOME = ["W4A16", "GPTQ", "GPTQ-W2", "NVFP4", "W8A8"]
SCALED = ["W4A16", "W4A16_ASYM", "GPTQ", "GPTQ-W2", "imatrix", "FP8", "GPTQ-FP8", "W8A8"]
PACKED = [*INT4, "NVFP4", "GPTQ-NVFP4"]

TABLE: list[tuple[str, list[str], Damage, str]] = [
    # name, schemes, damage, and who notices beside the digests
    ("all codes random", ALL, tensors(random_codes), "source"),
    ("one module's codes random", SOME, tensors(lambda t: random_codes(t, Q)), "source"),
    ("gate and up swapped", ALL, tensors(lambda t: swap(t, GATE, UP)), "source"),
    (
        "layers swapped",
        SOME,
        tensors(lambda t: swap(t, "model.layers.0", "model.layers.1")),
        "source",
    ),
    ("rows rolled", ["W4A16", "GPTQ-asym", *LOW, "NVFP4"], each("weight_packed", roll), "source"),
    ("rows rolled", ["FP8", "W8A8"], each("weight", roll, only=Q), "source"),
    ("nibbles reversed", PACKED, each("weight_packed", reverse_nibbles), "source"),
    ("scales x 1000", SCALED, each("weight_scale", lambda s: s * 1000), "source report"),
    (
        "scales x 3",
        [s for s in SCALED if s != "GPTQ-W2"],
        each("weight_scale", lambda s: s * 3, only=Q),
        "source report",
    ),
    ("scales all 1", SCALED, each("weight_scale", torch.ones_like), "source report"),
    (
        "global scale x 8",
        ["NVFP4", "GPTQ-NVFP4"],
        each("weight_global_scale", lambda s: s * 8),
        "source report",
    ),
    (
        "zero points random",
        ["W4A16_ASYM", "GPTQ-asym"],
        each("weight_zero_point", random_like),
        "source",
    ),
    ("input_scale x 100", ["W8A8", "FP8"], each("input_scale", lambda s: s * 100), "report"),
    (
        "input_global_scale x 100",
        ["NVFP4"],
        each("input_global_scale", lambda s: s * 100),
        "report",
    ),
    ("k_scale x 100", ["KV"], each("k_scale", lambda s: s * 100), "report"),
    (
        "both KV scales of a layer missing",
        ["KV"],
        drop("model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale"),
        "source alone report",
    ),
    ("bit flip in a norm", ["W4A16"], each("weight", flip_bit, "model.norm"), "source"),
    (
        "norm in fp32",
        ["W4A16"],
        tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()})),
        "source",
    ),
    ("bias missing", ["W4A16"], drop(f"{Q}.bias"), "source"),
    ("scale missing", SOME, drop(f"{Q}.weight_scale"), "source alone report"),
    ("extra shard", ["W4A16"], extra_shard, "source alone report"),
    ("rms_norm_eps", ["W4A16"], set_value("rms_norm_eps", 1), "source"),
    (
        "rope_theta",
        ["W4A16"],
        config(lambda c: c.update(rope_theta=1.0, rope_parameters={"rope_theta": 1.0})),
        "source",
    ),
    ("more layers", ["W4A16"], set_value("num_hidden_layers", 3), "source alone report"),
    ("fewer layers", ["W4A16"], set_value("num_hidden_layers", 1), "source alone report"),
    ("hidden_size", ["W4A16"], set_value("hidden_size", 64), "source alone report"),
    ("vocab_size", ["W4A16"], set_value("vocab_size", 256), "source alone report"),
    ("other architecture", ["W4A16"], set_value("architectures", ["LlamaForCausalLM"]), "source"),
    (
        "quant_method gone",
        ["W4A16"],
        config(lambda c: c["quantization_config"].pop("quant_method")),
        "source alone report",
    ),
    (
        "head no longer ignored",
        ["W4A16", "FP8"],
        config(lambda c: c["quantization_config"].update(ignore=[])),
        "source alone report",
    ),
    (
        "module ignored",
        ["W4A16", "FP8", "NVFP4"],
        config(lambda c: c["quantization_config"]["ignore"].append(Q)),
        "source alone report",
    ),
    (
        "group_size",
        ["W4A16"],
        group(lambda g: g["weights"].update(group_size=32)),
        "source alone report",
    ),
    (
        "symmetric",
        ["W4A16", "W4A16_ASYM"],
        group(lambda g: g["weights"].update(symmetric=not g["weights"]["symmetric"])),
        "source alone report",
    ),
    (
        "num_bits",
        ["W4A16"],
        group(lambda g: g["weights"].update(num_bits=8)),
        "source alone report",
    ),
    ("truncated tokenizer", ["W4A16"], truncate("tokenizer.json"), "source alone report"),
    ("truncated weights", ["W4A16"], truncate("model.safetensors"), "source alone report"),
]
ROWS = [
    pytest.param(scheme, damage, notices, id=f"{name}-{scheme}".replace(" ", "_"))
    for name, schemes, damage, notices in TABLE
    for scheme in schemes
]


@pytest.mark.parametrize(("scheme", "damage", "notices"), ROWS)
def test_damage(made: Made, tmp_path: Path, scheme: str, damage: Damage, notices: str) -> None:
    good = made.checkpoints[scheme]
    whole = shutil.copytree(good, tmp_path / "q")
    damage(whole)
    assert [n for n in changed(good, whole) if n not in HELPERS], "nothing was damaged"
    by_digest = validate_folder(whole, None, False).problems
    assert any("was changed after the run" in p or "files that the run" in p for p in by_digest)
    remove(whole, "provenance.json", "recipe.yaml")
    if "report" in notices:
        assert validate_folder(whole, None, False).problems
    remove(whole, "report.json", "report.html")
    if "source" in notices:
        assert validate_folder(whole, made.source, False).problems
    if "alone" in notices:
        assert validate_folder(whole, None, False).problems


def remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def changed(first: Path, second: Path) -> list[str]:
    names = {path.name for folder in (first, second) for path in folder.iterdir()}

    def content(path: Path) -> bytes:
        return path.read_bytes() if path.is_file() else b""

    return [name for name in sorted(names) if content(first / name) != content(second / name)]
