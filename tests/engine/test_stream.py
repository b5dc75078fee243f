"""From file to file: the same tensors as from a model, for sources that no model class reads."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, read, small_model, token_batches
from safetensors.torch import save_file
from torch.nn import Embedding, Linear
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.checkpoint import CheckpointView, CheckpointWriter
from steelyard.errors import CheckpointError, NonFiniteError, PlanError, SteelyardError
from steelyard.model.file_modules import FilesModel
from steelyard.modifiers import QuantizationModifier

HIDDEN, INNER, EXPERTS = 64, 32, 3
LAYER = "model.layers.0"
Tensors = dict[str, torch.Tensor]


def modifier(scheme: str = "FP8_DYNAMIC", **options: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"scheme": scheme, "ignore": ["lm_head"], **options})


def group_32(**options: Any) -> QuantizationModifier:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, **options}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return QuantizationModifier(config_groups=groups, ignore=["lm_head"])


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / 8).to(dtype)


def save(folder: Path, tensors: Tensors, per_file: int = 1000, **config: Any) -> Path:
    """Write a checkpoint of a model that nobody knows."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for i in range(0, len(names), per_file):
        file = f"model-{i // per_file + 1:05d}.safetensors"
        part = names[i : i + per_file]
        save_file({n: tensors[n].contiguous() for n in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    content = {"model_type": "nobody-knows", "hidden_size": HIDDEN, "dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def attention(seed: int = 0) -> Tensors:
    shapes = {"q_proj": (96, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 96)}
    return {
        f"{LAYER}.self_attn.{name}.weight": noise(*shape, seed=seed + i) * (i + 1)
        for i, (name, shape) in enumerate(shapes.items())
    }


# -- which module is what -----------------------------------------------------------------------


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt2"])
def test_inferred_modules_are_those_of_the_model_class(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    model.save_pretrained(tmp_path / "m")
    inferred = dict(FilesModel(CheckpointView(tmp_path / "m")).named_modules())
    for name, module in model.named_modules():
        if name in inferred and isinstance(module, (Linear, Embedding)):
            assert isinstance(module, type(inferred[name])), name
    linear = {n for n, m in model.named_modules() if isinstance(m, Linear)} & inferred.keys()
    assert len(linear) >= 12


def test_weights_that_lie_the_other_way_round_are_left(tmp_path: Path) -> None:
    small_model("gpt2").save_pretrained(tmp_path / "m")
    with pytest.raises(PlanError, match=r"nothing would be quantized: .* are Conv1D"):
        oneshot(tmp_path / "m", modifier(ignore=["lm_head"]), None, tmp_path / "q")
    turned = {"a.weight": noise(32, 64), "a.bias": noise(64), "b.weight": noise(64, 64)}
    result = oneshot(save(tmp_path / "t", turned), modifier(ignore=[]), None, tmp_path / "q")
    assert list(result.modules) == ["b"]
    assert [left.name for left in result.plan.left] == ["a"]
    assert "Conv1D" in result.plan.left[0].reason


def test_names_that_are_no_attribute_names(tmp_path: Path) -> None:
    odd = {"forward.weight": noise(32, 32), "a..b.weight": noise(32, 32), "weight": noise(32, 32)}
    odd |= {"config.x.weight": noise(32, 32), "c.weight": noise(32, 32), "c.0.weight": noise(8, 32)}
    result = oneshot(save(tmp_path / "m", odd), modifier(ignore=[]), None, tmp_path / "q")
    assert {"forward", "config.x", "c", "c.0", "a..b"} <= set(result.modules)
    written = read(tmp_path / "q")
    assert_close(written["weight"], odd["weight"], rtol=0, atol=0)


def test_routers_are_left_and_named_for_the_server(tmp_path: Path) -> None:
    tensors = {**attention(), f"{LAYER}.mlp.gate.weight": noise(8, 64)}
    source = save(tmp_path / "m", tensors)
    result = oneshot(source, modifier(), None, tmp_path / "q")
    assert f"{LAYER}.mlp.gate" in [left.name for left in result.plan.left]
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert f"{LAYER}.mlp.gate" in config["quantization_config"]["ignore"]
    by_name = modifier(targets=["Linear", "re:.*mlp.gate$"])
    oneshot(source, by_name, None, tmp_path / "all")
    assert read(tmp_path / "all")[f"{LAYER}.mlp.gate.weight"].dtype == torch.bfloat16


def test_classes_that_the_files_do_not_tell_are_asked_of_the_model(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    by_class = modifier(ignore=["lm_head", "LlamaMLP", "re:.*mlp.*"])
    result = oneshot(tmp_path / "m", by_class, None, tmp_path / "q")
    assert result.modules and not any("mlp" in name for name in result.modules)


def test_tied_head_that_is_stored_is_not_quantized(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": noise(128, 64), "lm_head.weight": noise(128, 64)}
    source = save(tmp_path / "m", {**tensors, **attention()}, tie_word_embeddings=True)
    with pytest.raises(PlanError, match=r"lm_head shares its weight with model\.embed_tokens"):
        oneshot(source, modifier(ignore=[]), None, tmp_path / "q")


# -- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["NVFP4A16", "W4A16"])
@pytest.mark.parametrize("per_file", [1, 2, 9])
def test_shards_make_no_difference(scheme: str, per_file: int, tmp_path: Path) -> None:
    """Layers that share a scale find it, in whichever files they lie."""
    whole = {**attention(), "model.norm.weight": noise(64), **wide_mlp()}
    chosen = modifier(scheme) if scheme == "NVFP4A16" else group_32()
    oneshot(save(tmp_path / "one", whole), chosen, None, tmp_path / "a")
    cut = dict(sorted(whole.items(), key=lambda item: hash(item[0])))  # partners far apart
    oneshot(save(tmp_path / "many", cut, per_file), chosen, None, tmp_path / "b")
    first, second = read(tmp_path / "a"), read(tmp_path / "b")
    assert_close(first, second, rtol=0, atol=0)
    if scheme == "NVFP4A16":
        names = [f"{LAYER}.self_attn.{p}_proj.weight_global_scale" for p in "qkv"]
        assert len({float(first[name]) for name in names}) == 1
        assert float(first[names[0]]) != float(first[names[0].replace("q_proj", "o_proj")])


def wide_mlp() -> Tensors:
    return {
        f"{LAYER}.mlp.gate_proj.weight": noise(96, 64, seed=7),
        f"{LAYER}.mlp.up_proj.weight": noise(96, 64, seed=8) * 5,
        f"{LAYER}.mlp.down_proj.weight": noise(64, 96, seed=9),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types_of_the_source(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in attention().items()}
    oneshot(save(tmp_path / "m", tensors), group_32(), None, tmp_path / "q")
    written = read(tmp_path / "q")
    assert written[f"{LAYER}.self_attn.q_proj.weight_scale"].dtype == dtype


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_transformers_finds_the_experts_again(scheme: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = small_model("qwen3_moe", **sizes, moe_intermediate_size=128)
    model.save_pretrained(tmp_path / "m")
    oneshot(tmp_path / "m", modifier(scheme), None, tmp_path / "q")
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "q", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    written = read(tmp_path / "q")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert (name if scheme == "FP8_DYNAMIC" else f"{name}_packed") in written
    with torch.no_grad():
        ours, plain = (m(token_batches(9)[0]).logits.flatten().float() for m in (loaded, model))
    assert float(torch.cosine_similarity(ours, plain, dim=0)) > 0.93


# -- sources that hold something else -----------------------------------------------------------


def experts(prefix: str = f"{LAYER}.mlp.experts") -> Tensors:
    """Matrices of each expert, by the names that servers know."""
    found = {}
    for i in range(EXPERTS):
        found[f"{prefix}.{i}.gate_proj.weight"] = noise(INNER, HIDDEN, seed=10 * i)
        found[f"{prefix}.{i}.up_proj.weight"] = noise(INNER, HIDDEN, seed=10 * i + 1)
        found[f"{prefix}.{i}.down_proj.weight"] = noise(HIDDEN, INNER, seed=10 * i + 2)
    return found


def stacked(single: Tensors, turned: bool, prefix: str = f"{LAYER}.mlp.experts") -> Tensors:
    def stack(*leaves: str) -> torch.Tensor:
        rows = [
            torch.cat([single[f"{prefix}.{i}.{leaf}.weight"] for leaf in leaves])
            for i in range(EXPERTS)
        ]
        joined = torch.stack(rows)
        return joined.transpose(1, 2).contiguous() if turned else joined

    return {
        f"{prefix}.gate_up_proj": stack("gate_proj", "up_proj"),
        f"{prefix}.down_proj": stack("down_proj"),
    }


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16", "NVFP4A16"])
def test_stacked_experts_are_quantized_one_by_one(
    scheme: str, turned: bool, tmp_path: Path
) -> None:
    single = experts()
    chosen = group_32() if scheme == "W4A16" else modifier(scheme)
    oneshot(save(tmp_path / "single", {**attention(), **single}), chosen, None, tmp_path / "a")
    source = save(tmp_path / "stacked", {**attention(), **stacked(single, turned)})
    result = oneshot(source, chosen, None, tmp_path / "b")
    assert len(result.modules) == 4 + 3 * EXPERTS
    assert_close(read(tmp_path / "b"), read(tmp_path / "a"), rtol=0, atol=0)


def test_stacks_that_are_ignored_or_unclear_stay_as_they_are(tmp_path: Path) -> None:
    stack = stacked(experts(), False)
    source = save(tmp_path / "m", {**attention(), **stack})
    chosen = modifier(ignore=["re:.*experts.*"])
    oneshot(source, chosen, None, tmp_path / "q")
    assert_close({n: read(tmp_path / "q")[n] for n in stack}, stack, rtol=0, atol=0)


def test_experts_with_a_bias_are_refused(tmp_path: Path) -> None:
    """As gpt-oss has them; no server reads them from compressed-tensors."""
    stack = stacked(experts(), True)
    stack[f"{LAYER}.mlp.experts.gate_up_proj_bias"] = noise(3, 64)
    source = save(tmp_path / "m", {**attention(), **stack})
    with pytest.raises(PlanError, match=r"experts with a bias.*MXFP4.*ignore"):
        oneshot(source, modifier(), None, tmp_path / "q")
    oneshot(source, modifier(ignore=["re:.*experts.*"]), None, tmp_path / "q")
    assert_close({n: read(tmp_path / "q")[n] for n in stack}, stack, rtol=0, atol=0)


def in_blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, inverse scales and what they stand for, block by block in fp64."""
    rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // size), -(-columns // size))
    true = torch.empty(weight.shape, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            block = weight[place].double()
            scales[i, j] = block.abs().max() / 448
            codes[place] = (block / scales[i, j].double()).float().to(torch.float8_e4m3fn)
            true[place] = codes[place].double() * scales[i, j].double()
    return codes, scales, true


def test_fp8_source_is_decoded_first(tmp_path: Path) -> None:
    """Against a checkpoint that was decoded by hand; also what is not quantized is decoded."""
    blocks, plain = {}, {}
    for name, weight in {**attention(), "lm_head.weight": noise(72, 64, seed=5)}.items():
        codes, scales, true = in_blocks(weight.float(), 48)
        blocks.update({name: codes, f"{name}_scale_inv": scales})
        plain[name] = true.to(torch.bfloat16)
    fp8 = {"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}
    source = save(tmp_path / "fp8", blocks, quantization_config=fp8)
    oneshot(source, group_32(), None, tmp_path / "a")
    oneshot(save(tmp_path / "plain", plain), group_32(), None, tmp_path / "b")
    assert_close(read(tmp_path / "a"), read(tmp_path / "b"), rtol=0, atol=0)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert read(tmp_path / "a")["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight_scale_inv"), "lm_head.weight_scale_inv is missing"),
        (
            lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(3, 3)}),
            r"\(3, 3\) for a weight of \(72, 64\).*expected \(2, 2\)",
        ),
    ],
)
def test_fp8_source_that_is_broken(
    change: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    codes, scales, _ = in_blocks(noise(72, 64).float(), 48)
    tensors = {"lm_head.weight": codes, "lm_head.weight_scale_inv": scales, **attention()}
    change(tensors)
    fp8 = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    source = save(tmp_path / "m", tensors, quantization_config=fp8)
    with pytest.raises(CheckpointError, match=message):
        oneshot(source, modifier(), None, tmp_path / "q")


def test_other_quantized_sources_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "m", attention(), quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match=r"quantized already .*'awq'.*made from"):
        oneshot(source, modifier(), None, tmp_path / "q")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_config_that_is_none(text: str, tmp_path: Path) -> None:
    source = save(tmp_path / "m", attention())
    (source / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json .*download it again"):
        oneshot(source, modifier(), None, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_weight_that_is_not_finite(tmp_path: Path) -> None:
    tensors = attention()
    name = f"{LAYER}.self_attn.v_proj"
    tensors[f"{name}.weight"][3, 5] = float("nan")
    source = save(tmp_path / "m", tensors)
    with pytest.raises(NonFiniteError, match=name.replace(".", r"\.")):
        oneshot(source, modifier(), None, tmp_path / "q")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4A16"])
def test_weight_whose_square_is_no_float(scheme: str, tmp_path: Path) -> None:
    tensors = attention()
    name = f"{LAYER}.self_attn.o_proj"
    tensors[f"{name}.weight"][3, 5] = 2e38
    result = oneshot(save(tmp_path / "m", tensors), modifier(scheme), None, tmp_path / "q")
    assert 0 <= result.modules[name].error < 0.01


def test_mutated_checkpoints_write_nothing_else(tmp_path: Path) -> None:
    """Either a whole output or an error; nothing beside it, and the source as it was."""
    source = save(tmp_path / "m", attention())
    file = next(source.glob("*.safetensors"))
    good = file.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    chance = random.Random(0)
    outcomes = {"whole": 0, "refused": 0}
    for _ in range(120):
        raw = bytearray(good)
        for _ in range(chance.randint(1, 3)):  # mostly in the header
            end = length if chance.random() < 0.8 else len(raw)
            raw[chance.randrange(end)] ^= 1 << chance.randrange(8)
        file.write_bytes(raw[: chance.choice([len(raw), len(raw), chance.randrange(len(raw))])])
        before = {path: path.read_bytes() for path in source.iterdir()}
        try:
            oneshot(source, modifier(), None, tmp_path / "q")
            outcomes["whole"] += 1
            shutil.rmtree(tmp_path / "q")
        except SteelyardError:
            outcomes["refused"] += 1
        assert [path.name for path in tmp_path.iterdir()] == ["m"]
        assert {path: path.read_bytes() for path in source.iterdir()} == before
    assert min(outcomes.values()) > 5, outcomes


# -- memory -------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from steelyard import oneshot
from steelyard.modifiers import QuantizationModifier
modifier = QuantizationModifier(scheme="W4A16", weight_observer="memoryless_mse")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = oneshot(sys.argv[1], modifier, None, sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, result.plan.memory // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """960 MB go through in less than half as much, and in what the plan said."""
    one = noise(4096, 2048)
    tensors = {f"layers.{i}.o_proj.weight": one + i for i in range(60)}
    source = save(tmp_path / "m", tensors, per_file=20)
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "q")],
        check=True,
        capture_output=True,
        text=True,
    )
    grown, planned = map(int, answer.stdout.split())
    assert grown < planned + 100_000
    assert planned < 400_000


def test_marks_that_take_long_are_made_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark names all modules so far: with 100,000 of them it takes longer than the work."""
    source = save(tmp_path / "m", {**attention(), "model.embed_tokens.weight": noise(64, 64)})
    costs, mark = [], CheckpointWriter.mark

    def due(writer: CheckpointWriter, cost: float = 0.0) -> bool:
        costs.append(cost)
        return True

    def slow(writer: CheckpointWriter, *arguments: Any) -> None:
        until = time.thread_time() + 0.02  # work, not the wait for a disk
        while time.thread_time() < until:
            pass
        mark(writer, *arguments)

    monkeypatch.setattr(CheckpointWriter, "due", due)
    monkeypatch.setattr(CheckpointWriter, "mark", slow)
    oneshot(str(source), modifier(), output_dir=tmp_path / "q")
    assert costs[0] == 0
    assert len(costs) > 2
    assert min(costs[1:]) >= 0.02
