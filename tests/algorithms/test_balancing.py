"""Transforms that fold into the weights: the model stays the same, and loses less when quantized.

Oracles are transformers' own logits and inputs, and NumPy.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import assert_same_tensors, read, small_model, token_batches
from interruption import Stop, small_steps, stop_at_mark
from module_calls import calls_of
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.algorithms.block import Block
from steelyard.algorithms.input_statistics import InputStatistics
from steelyard.algorithms.pairs import Pair, folded
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import RecipeError
from steelyard.modifiers import GPTQModifier, Modifier, QuantizationModifier
from steelyard.modifiers.auto_transform import TransformModifier
from steelyard.modifiers.awq import AWQMapping, AWQModifier
from steelyard.modifiers.smoothing import LogarithmicEqualizationModifier, SmoothQuantModifier
from steelyard.recipes import load_recipe

HEAD_ONLY = QuantizationModifier(scheme="FP8_DYNAMIC", targets=["lm_head"])
GROUPS = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "strategy": "group",
        "group_size": 32,
        "observer": "memoryless_minmax",
    },
}
STATIC = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel", "observer": "memoryless_minmax"},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "observer": "minmax"},
}


def samples() -> list[torch.Tensor]:
    return [row.unsqueeze(0) for batch in token_batches() for row in batch]


def saved(
    folder: Path,
    family: str,
    dtype: torch.dtype = torch.float32,
    outliers: float = 8,
    **changes: Any,
) -> Path:
    """Save a model whose gains and biases differ, with a few channels of large inputs."""
    model = small_model(family, dtype, tie_word_embeddings=False, **changes)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        if name.endswith("layernorm.weight") or "up_proj" in name:
            parameter.data[3::17] *= outliers
    model.save_pretrained(folder)
    return folder


def run(source: Path, out: Path, *recipe: Modifier) -> Any:
    return oneshot(source, list(recipe), samples(), out, shuffle_calibration_samples=False)


def logits_of(folder: Path) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(each).logits for each in samples()]


def without_quantization(source: Path, written: Path, folder: Path) -> tuple[Path, set[str]]:
    """Return a plain checkpoint with all changes of a run but the head's, and their names."""
    before, after = read(source), read(written)
    kept = {n: before[n] if n == "lm_head.weight" else after[n] for n in before}
    skipped = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(source, folder, ignore=skipped)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder, {name for name in before if not torch.equal(before[name], kept[name])}


# -- the model stays the same -----------------------------------------------------------------

LLAMA = {"input_layernorm", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
CHANGED = {
    "llama": LLAMA | ATTENTION,
    "qwen3": LLAMA | ATTENTION,
    "gemma3": (LLAMA | ATTENTION | {"pre_feedforward_layernorm"}) - {"post_attention_layernorm"},
    "qwen3_moe": LLAMA | ATTENTION | {"gate"},
    "phi3": {
        *("input_layernorm", "post_attention_layernorm", "qkv_proj", "gate_up_proj"),
        *("o_proj", "down_proj"),
    },
    "opt": {
        *("self_attn_layer_norm", "final_layer_norm", "q_proj", "k_proj", "v_proj", "out_proj"),
        *("fc1", "fc2"),
    },
}


@pytest.mark.parametrize("family", CHANGED)
def test_folding_leaves_the_logits(family: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", family)
    result = run(source, tmp_path / "q", SmoothQuantModifier(), HEAD_ONLY)
    plain, changed = without_quantization(source, tmp_path / "q", tmp_path / "plain")
    assert {name.split(".")[-2] for name in changed} == CHANGED[family]
    assert not [note for note in result.notes if "not balanced" in note]
    for before, after in zip(logits_of(source), logits_of(plain), strict=True):
        assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_a_gain_of_one_plus_weight_is_made_up_for_as_stored() -> None:
    """In bf16, (1 + w) / factor - 1 loses most digits of a small gain; the readers know."""
    norm, reader = torch.nn.LayerNorm(64, bias=False), torch.nn.Linear(64, 8, bias=False)
    root = torch.nn.ModuleDict({"norm": norm, "reader": reader})
    norm.weight.data = torch.linspace(-0.9, 3, 64).bfloat16()
    block = Block("", root, {"norm": norm, "reader": reader})
    factor = torch.linspace(0.01, 50, 64)
    done = folded(block, Pair("norm", ("reader",), 64, offset=1.0), factor)
    gain = 1 + norm.weight.data.float()
    stored = 1 + done.tensors["norm.weight"].float()
    assert (stored - gain / factor).abs().max() > 1e-3, "rounding must matter for this test"
    assert_close(done.tensors["reader.weight"] * stored, reader.weight.data * gain)


def test_heads_of_grouped_queries_share_factors(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama")
    run(source, tmp_path / "q", SmoothQuantModifier(), HEAD_ONLY)
    before, after = read(source), read(tmp_path / "q")
    name = "model.layers.1.self_attn.o_proj.weight"
    factor = (after[name] / before[name]).median(0).values.reshape(2, 2, 16)  # kv head, repeat
    assert_close(factor[:, 0], factor[:, 1])
    rows = "model.layers.1.self_attn.v_proj.weight"
    norm = "model.layers.1.input_layernorm.weight"
    own = before[rows] * (before[norm] / after[norm])
    assert_close(after[rows] * factor[:, 0].reshape(-1, 1), own, rtol=1e-4, atol=1e-6)


# -- factors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.5, 0.8, None])
def test_factors_against_numpy(strength: float | None, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama")
    step = (
        LogarithmicEqualizationModifier()
        if strength is None
        else SmoothQuantModifier(smoothing_strength=strength)
    )
    run(source, tmp_path / "q", step, HEAD_ONLY)
    before, after = read(source), read(tmp_path / "q")
    layer = "model.layers.1"
    calls = calls_of(source, f"{layer}.self_attn.q_proj", samples())
    x = np.concatenate([args[0].numpy().reshape(-1, 64) for args, _, _ in calls])
    largest = np.abs(x).max(0)
    names = [f"{layer}.self_attn.{each}_proj.weight" for each in "qkv"]
    weights = np.max([np.abs(before[name].numpy()).max(0) for name in names], axis=0)
    if strength is None:
        factor = largest / np.log2(2 + largest)
    else:
        factor = largest**strength / weights ** (1 - strength)
    norm = f"{layer}.input_layernorm.weight"
    assert_close(after[norm].numpy(), before[norm].numpy() / factor, rtol=1e-4, atol=1e-6)
    for name in names[:2]:
        assert_close(after[name].numpy(), before[name].numpy() * factor, rtol=1e-4, atol=1e-6)


def test_samples_join_as_one_process() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(7, 5, generator=generator) for _ in range(6)]
    whole = InputStatistics(limit=10)
    parts = [InputStatistics(limit=10) for _ in range(2)]
    for number, batch in enumerate(batches):
        whole.add(batch, number)
        parts[number % 2].add(batch, number)
    joined = InputStatistics(limit=10)
    joined.restore([part.state() for part in reversed(parts)], torch.device("cpu"))
    assert_close(joined.magnitudes(), torch.cat(batches).abs().amax(0), rtol=0, atol=0)
    assert_close(joined.magnitudes(even=True), torch.cat(batches[::2]).abs().amax(0))
    for one, other in zip(whole.halves(torch.device("cpu")), joined.halves("cpu"), strict=True):  # type: ignore[arg-type]
        assert_close(one, other, rtol=0, atol=0)
    fitted, held_out = whole.halves(torch.device("cpu"))
    even = {tuple(row.tolist()) for batch in batches[::2] for row in batch}
    assert {tuple(row.tolist()) for row in fitted} <= even
    assert not {tuple(row.tolist()) for row in held_out} & even


# -- AWQ --------------------------------------------------------------------------------------


def test_awq_is_no_worse_on_held_out_batches(tmp_path: Path) -> None:
    """The oracle decodes both checkpoints, and runs transformers' own inputs of odd batches."""
    source = saved(tmp_path / "m", "llama")
    pairs = {
        "input_layernorm": [f"self_attn.{each}_proj" for each in "qkv"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    }
    mappings = [AWQMapping(f"re:.*{n}", [f"re:.*{r}" for r in rs]) for n, rs in pairs.items()]
    plain = QuantizationModifier(config_groups={"all": GROUPS}, ignore=["lm_head"])
    oneshot(source, plain, output_dir=tmp_path / "plain")
    run(source, tmp_path / "awq", AWQModifier(n_grid=8, mappings=mappings), plain)
    before, after = read(source), read(tmp_path / "awq")
    ratios = []
    for index, (norm, names) in itertools.product(range(3), pairs.items()):
        layer = f"model.layers.{index}"
        factor = before[f"{layer}.{norm}.weight"] / after[f"{layer}.{norm}.weight"]
        calls = calls_of(source, f"{layer}.{names[0]}", samples())[1::2]
        x = torch.cat([args[0].reshape(-1, 64) for args, _, _ in calls])
        for name in names:
            exact = x @ before[f"{layer}.{name}.weight"].T
            errors = []
            for folder, columns in (("plain", torch.ones(64)), ("awq", factor)):
                written = WrittenCheckpoint(tmp_path / folder, None)
                weight = torch.cat([part for _, part in written.decode(f"{layer}.{name}")])
                errors.append(float(((x / columns) @ weight.T - exact).square().sum()))
            ratios.append(errors[1] / errors[0])
    assert max(ratios) <= 1 + 1e-6, ratios
    assert min(ratios) < 0.9, ratios


def test_what_held_out_tokens_do_not_confirm_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(block: Block, pair: Pair, *_: Any) -> Any:
        return torch.full((pair.size,), 2.0), [0.5, 1.1]

    monkeypatch.setattr("steelyard.algorithms.awq.best_factor", found)
    source = saved(tmp_path / "m", "llama")
    plain = QuantizationModifier(config_groups={"all": GROUPS}, ignore=["lm_head"])
    result = run(source, tmp_path / "q", AWQModifier(), plain)
    assert not result.changed


def test_what_the_output_of_the_layer_does_not_confirm_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that seem to gain, but a layer whose output gets worse as stored."""

    def found(block: Block, pair: Pair, *_: Any) -> Any:
        factor = torch.ones(pair.size)
        factor[::32] = 100.0  # one column of each group
        return factor, [0.5, 0.5]

    monkeypatch.setattr("steelyard.algorithms.awq.best_factor", found)
    source = saved(tmp_path / "m", "llama")
    plain = QuantizationModifier(config_groups={"all": GROUPS}, ignore=["lm_head"])
    result = run(source, tmp_path / "q", AWQModifier(), plain)
    assert not result.changed


@pytest.mark.parametrize("step", [AWQModifier(n_grid=2), TransformModifier(n_grid=2)])
def test_gptq_is_left_what_only_rounding_to_nearest_gains(step: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama")
    options = {"config_groups": {"all": GROUPS}, "ignore": ["lm_head"]}
    result = run(source, tmp_path / "both", step, GPTQModifier(**options))
    alone = run(source, tmp_path / "alone", GPTQModifier(**options))
    assert_same_tensors(tmp_path / "both", tmp_path / "alone")
    words = "changes nothing: the modifier that rounds the weights makes up for large inputs itself"
    assert any(words in note for note in result.notes) and words in str(result.plan)
    assert result.plan.forward == alone.plan.forward  # nothing is compared


def test_what_gptq_does_not_round_alone_is_measured(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama")
    groups = {"all": {**GROUPS, "targets": [r"re:.*(q|k|v|o)_proj$"]}}
    nearest = {"config_groups": {"all": {**GROUPS, "targets": [r"re:.*(gate|up|down)_proj$"]}}}
    steps = [GPTQModifier(config_groups=groups), QuantizationModifier(**nearest)]
    result = run(source, tmp_path / "q", AWQModifier(n_grid=2), *steps)
    assert not any("changes nothing" in note for note in result.notes)
    assert any("input not balanced" in n and "makes up for large" in n for n in result.notes)


def test_awq_with_a_scheme_of_its_own(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama")
    own = {"scheme": "W4A16", "group_size": 32, "ignore": ["lm_head"]}
    both = load_recipe(AWQModifier(**own, n_grid=4, duo_scaling="both"))
    assert [type(each).__name__ for each in both.modifiers] == [
        "AWQModifier",
        "QuantizationModifier",
    ]
    assert load_recipe(both.text).modifiers == both.modifiers
    oneshot(source, AWQModifier(**own, n_grid=4, duo_scaling="both"), samples(), tmp_path / "one")
    step = AWQModifier(n_grid=4, duo_scaling="both", ignore=["lm_head"])
    oneshot(source, [step, QuantizationModifier(**own)], samples(), tmp_path / "two")
    assert_same_tensors(tmp_path / "one", tmp_path / "two")


# -- the measured choice ----------------------------------------------------------------------


def served_error(source: Path, written: Path) -> float:
    from steelyard.evaluate import evaluate

    held_out = [{"input_ids": row} for batch in token_batches(seed=5) for row in batch]
    return evaluate(source, written, held_out).kl_divergence


def test_auto_takes_what_lowers_the_error(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama", outliers=30)
    last = QuantizationModifier(config_groups={"all": STATIC}, ignore=["lm_head"])
    run(source, tmp_path / "plain", last)
    result = run(source, tmp_path / "auto", TransformModifier(n_grid=4), last)
    assert any("TransformModifier balanced" in note for note in result.notes)
    error = served_error(source, tmp_path / "auto")
    assert error < 0.5 * served_error(source, tmp_path / "plain")


# -- mappings, and what cannot be balanced ----------------------------------------------------


def test_only_mapped_pairs_are_balanced(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "llama")
    mappings = [
        [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"],
        [["re:.*down_proj"], "re:.*gate_proj"],  # wrong: an activation is between them
        [["re:.*gate_proj"], "re:.*post_attention_layernorm"],  # up_proj reads it, too
    ]
    result = run(source, tmp_path / "q", SmoothQuantModifier(mappings=mappings), HEAD_ONLY)
    _, changed = without_quantization(source, tmp_path / "q", tmp_path / "plain")
    kinds = {name.split(".")[-2] for name in changed}
    assert kinds == {"input_layernorm", "q_proj", "k_proj", "v_proj"}
    notes = "\n".join(result.notes)
    assert "layers.0.mlp.gate_proj: input not balanced by SmoothQuantModifier, since more" in notes
    assert "layers.0.mlp.down_proj: input not balanced" in notes
    assert "no mapping names it" in notes  # o_proj and up_proj


def test_what_cannot_be_balanced_is_listed(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", "opt", activation_function="gelu")
    result = run(source, tmp_path / "q", SmoothQuantModifier(ignore=["lm_head"]), HEAD_ONLY)
    listed = [note for note in result.notes if "not balanced" in note]
    assert len(listed) == 3
    assert "layers.0.fc2: input not balanced by SmoothQuantModifier, since its input" in listed[0]
    assert "fc1" in listed[0]
    _, changed = without_quantization(source, tmp_path / "q", tmp_path / "plain")
    assert not [name for name in changed if "fc2" in name]


def test_forms_of_options() -> None:
    pair = AWQMapping("re:.*norm", ["re:.*q_proj"])
    assert AWQModifier(mappings=[pair]).mappings == [pair]
    assert SmoothQuantModifier(mappings=[(["re:.*q_proj"], "re:.*norm")]).mappings == [pair]
    named = {"smooth_layer": "re:.*norm", "balance_layers": ["re:.*q_proj"]}
    assert AWQModifier(mappings=[named]).mappings == [pair]
    assert AWQModifier(offload_device=torch.device("cpu")).sample_device == torch.device("cpu")
    text = "SmoothQuantModifier: {algorithm: log_equalization}"
    assert load_recipe(text).modifiers == [SmoothQuantModifier(formula="log_equalization")]
    with pytest.raises(RecipeError, match="omit it"):
        AWQModifier(mappings=[{**named, "activation_hook_target": "mlp"}])
    with pytest.raises(RecipeError, match="no device"):
        AWQModifier(offload_device="basement")


def test_number_of_batches(tmp_path: Path) -> None:
    """Batches after the first few change nothing in the layers."""
    source = saved(tmp_path / "m", "llama", num_hidden_layers=1)
    few = SmoothQuantModifier(num_calibration_steps=2)
    run(source, tmp_path / "few", few, HEAD_ONLY)
    options = {"shuffle_calibration_samples": False}
    recipe = [SmoothQuantModifier(), HEAD_ONLY]
    oneshot(source, recipe, samples()[:2], tmp_path / "short", **options)
    left, right = read(tmp_path / "few"), read(tmp_path / "short")
    for name in (name for name in left if "layers" in name):
        assert_close(left[name], right[name], rtol=0, atol=0)


# -- resuming ---------------------------------------------------------------------------------


def test_a_stopped_run_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(tmp_path / "m", "qwen3_moe", torch.bfloat16)
    recipe = [
        AWQModifier(n_grid=2),
        QuantizationModifier(config_groups={"all": GROUPS}, ignore=["lm_head", "re:.*mlp.gate$"]),
    ]
    with small_steps():
        run(source, tmp_path / "whole", *recipe)
        with monkeypatch.context() as patch:
            stop_at_mark(patch, 2)
            with pytest.raises(Stop):
                run(source, tmp_path / "stopped", *recipe)
        result = run(source, tmp_path / "stopped", *recipe)
    assert any("resumed after" in note for note in result.notes)
    assert_same_tensors(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("step", [SmoothQuantModifier(), AWQModifier(), TransformModifier()])
def test_the_head_does_not_run_for_pairs_that_lie_in_layers(tmp_path: Path, step: Any) -> None:
    """Logits of a large vocabulary take more time and memory than a layer."""
    model = small_model("llama")
    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append(1))
    last = QuantizationModifier(config_groups={"group_0": STATIC}, ignore=["lm_head"])
    oneshot(model, [step, last], samples(), tmp_path / "q")
    assert len(calls) <= 1  # by the plan, without data
