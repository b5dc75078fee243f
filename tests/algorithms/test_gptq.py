"""GPTQ through `oneshot`: checkpoints that load, beat rounding to nearest, and can be continued."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import assert_same_tensors, read, small_model, token_batches
from interruption import Stop, lasting, stop_at_mark
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.algorithms import Algorithm, Block, Needs, Seen, algorithm_of
from steelyard.checkpoint import CheckpointWriter
from steelyard.distributed import ThreadPool
from steelyard.engine import passes
from steelyard.engine.block_work import Moment, Work
from steelyard.engine.passes import Passes
from steelyard.errors import RecipeError
from steelyard.kernels.dampening import STEPS
from steelyard.kernels.gptq_rounding import solve
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
from steelyard.modifiers.gptq import _stores_groups
from steelyard.observers.hessians import Hessians
from steelyard.recipes import load_recipe

SEED = """
quantization_stage:
  quantization_modifiers:
    GPTQModifier:
      weights:
        observer: mse
        observer_kwargs: {maxshrink: 0.1, patience: 10, averaging_constant: 0.05, grid: 128.0}
        num_bits: 4
        type: int
        symmetric: true
        strategy: channel
      targets: [Linear]
      ignore: [lm_head]
"""


def weights(**args: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"num_bits": 4, **args}}


def groups(size: int = 32, **args: Any) -> dict[str, Any]:
    return {"group_0": weights(strategy="group", group_size=size, **args)}


def correlated(seed: int = 0) -> list[torch.Tensor]:
    """Few different tokens, so that the inputs of layers are far from independent."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 24, (2, 32), generator=generator) for _ in range(6)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama", hidden_size=128, num_hidden_layers=3).save_pretrained(folder)
    return folder


@torch.no_grad()
def divergence(folder: Path, source: Path) -> float:
    """Mean KL divergence from the model before it was quantized."""
    plain, quantized = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(batch).logits
        for path in (source, folder)
        for batch in [torch.cat(correlated(seed=1))]
    )
    p, q = (logits.float().log_softmax(-1) for logits in (plain, quantized))
    return float((p.exp() * (p - q)).sum(-1).mean())


SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16 group 32": {"config_groups": groups()},
    "W4A16 group 32 asymmetric": {"config_groups": groups(symmetric=False)},
    "W4A16 channel": {"config_groups": {"group_0": weights(strategy="channel")}},
    "W4A16 tensor": {"config_groups": {"group_0": weights(strategy="tensor")}},
    "W3A16": {"config_groups": groups(num_bits=3)},
    "W8A8": {"scheme": "W8A8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "FP8_BLOCK": {"scheme": "FP8_BLOCK"},
    "NVFP4A16": {"scheme": "NVFP4A16"},
    "MXFP4A16": {"scheme": "MXFP4A16"},
    "FP8 static": {"scheme": "FP8"},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loaded_checkpoint_is_the_model_that_was_made(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    modifier = GPTQModifier(ignore=["lm_head"], **SCHEMES[scheme])
    result = oneshot(source, modifier, correlated(), tmp_path / "q")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(model, modifier, correlated(), tmp_path / "m")
    assert_close(read(tmp_path / "q"), read(tmp_path / "m"), rtol=0, atol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    batch = correlated(2)[0]
    with torch.no_grad():
        assert_close(loaded(batch).logits, model(batch).logits, rtol=0, atol=0)
    details = [m.details for m in result.modules.values()]
    assert len(details) == 21
    assert all(0 < d["loss"] <= d["nearest_loss"] for d in details)
    assert sum(d["loss"] < 0.9 * d["nearest_loss"] for d in details) > 10
    assert all(m.tokens == 6 * 64 for m in result.modules.values())


@pytest.mark.parametrize("observer", ["memoryless_minmax", "memoryless_mse", "optimal"])
def test_better_than_rounding_to_nearest(observer: str, source: Path, tmp_path: Path) -> None:
    found = {}
    for name, modifier in (
        ("gptq", GPTQModifier(config_groups=groups(observer=observer), ignore=["lm_head"])),
        (
            "nearest",
            QuantizationModifier(config_groups=groups(observer=observer), ignore=["lm_head"]),
        ),
    ):
        data = correlated() if name == "gptq" else None
        oneshot(source, modifier, data, tmp_path / name)
        found[name] = divergence(tmp_path / name, source)
    assert found["gptq"] < 0.8 * found["nearest"]


def test_what_a_layer_is_solved_with(source: Path, tmp_path: Path) -> None:
    """The first layer's q_proj, by hand: plain inputs, their Hessian, largest first."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    module = model.model.layers[0].self_attn.q_proj
    module.register_forward_pre_hook(lambda _m, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in correlated():
            model(batch)
    x = torch.cat(seen).double()
    moment = (x.t() @ x).float()
    chosen = groups(observer="memoryless_minmax")
    modifier = GPTQModifier(config_groups=chosen, ignore=["lm_head"], refinements=0)
    oneshot(source, modifier, correlated(), tmp_path)
    plain = QuantizationModifier(config_groups=chosen, ignore=["lm_head"])
    oneshot(source, plain, None, tmp_path / "nearest")
    name = "model.layers.0.self_attn.q_proj"
    ours, nearest = read(tmp_path), read(tmp_path / "nearest")
    assert_close(ours[f"{name}.weight_scale"], nearest[f"{name}.weight_scale"], rtol=0, atol=0)
    weight = module.weight.data.to(torch.bfloat16)
    scale, args = ours[f"{name}.weight_scale"], plain.config.config_groups["group_0"].weights
    order = torch.argsort(moment.diagonal(), descending=True, stable=True)
    expected = solve(weight, moment, scale, None, args, order=order).weight
    codes = unpacked(ours[f"{name}.weight_packed"]) * scale.repeat_interleave(32, 1)
    same = (codes == expected).float().mean()
    assert same > 0.995  # the rest are ties that another order of summation decides


def unpacked(words: torch.Tensor) -> torch.Tensor:
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
    return nibbles.flatten(1).to(torch.bfloat16) - 8


class Watching(Algorithm):
    """Adds what it sees to Hessians, as GPTQ does."""

    needs = Needs(inputs=True)  # type: ignore[assignment]

    def __init__(self, hessians: Hessians) -> None:
        super().__init__(None)
        self.hessians = hessians

    def see(self, state: Any, seen: Seen) -> None:
        self.hessians.see(seen.modules, seen.value)
        self.hessians.flush()


def test_layers_that_share_an_input_share_its_hessian(source: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    layer = model.model.layers[0]
    linear = {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    hessians = Hessians(linear)
    block = Block("", layer, linear)
    work = Work([(Watching(hessians), block)])
    with work.hooked(work.see_now(Moment)), torch.no_grad():
        for batch in correlated():
            model(batch)
    assert len({id(m) for m in hessians._hessians.values()}) == 4
    attention = [f"self_attn.{p}_proj" for p in "qkv"]
    assert len({id(hessians._hessians[n]) for n in attention}) == 1
    assert hessians.tokens("mlp.up_proj") == 6 * 64
    assert all(not m._forward_pre_hooks for m in linear.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_moments_are_those_in_float64(dtype: torch.dtype, workers: int) -> None:
    """Summed in fp32 whatever the type, batch by batch or at once, on any number of threads."""
    linear = torch.nn.Linear(300, 1, bias=False, dtype=dtype)
    batches = [torch.randn(2, 33, 300).to(dtype) for _ in range(20)]
    found = []
    for count, at_once in ((workers, True), (workers, False), (1, True)):
        with ThreadPool(count) as pool:
            hessians = Hessians({"l": linear}, pool=pool)
            for i, x in enumerate(batches):
                hessians.see(["l"], x, partial_sum=i * 16 // 20)
                if not at_once:
                    hessians.flush()
            hessians.flush()
        found.append(hessians.hessian("l"))
        assert hessians.tokens("l") == 20 * 66
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    tokens = torch.cat(batches).reshape(-1, 300).double()
    norms = tokens.square().sum(0).sqrt()
    got = found[0].double() / norms / norms.unsqueeze(1)
    assert_close(got, tokens.t() @ tokens / norms / norms.unsqueeze(1), rtol=0, atol=1e-6)


def test_half_precision_is_summed_in_fp32() -> None:
    linear = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    hessians = Hessians({"l": linear})
    hessians.see(["l"], torch.full((70_000, 2), 1.0, dtype=torch.bfloat16))  # bf16 stops at 256
    hessians.flush()
    assert torch.equal(hessians.hessian("l"), torch.full((2, 2), 70_000.0))


@pytest.mark.parametrize("scheme", ["W4A16", "static"])
def test_short_passes_change_nothing(
    scheme: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass ends before `down_proj` is computed, the second rounds each weight once.

    Both take place where a layer has no stages, as if it were one with experts.
    """
    monkeypatch.setattr(Passes, "_stages", lambda *_: None)
    static = {"input_activations": {"num_bits": 8, "strategy": "tensor"}}
    chosen = groups()
    if scheme == "static":
        chosen = {"group_0": {**weights(strategy="channel", num_bits=8), **static}}
    modifier = GPTQModifier(config_groups=chosen, ignore=["lm_head"])
    calls: list[int] = []
    linear = torch.nn.functional.linear

    def counting(*args: Any) -> torch.Tensor:
        calls.append(1)
        return linear(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", counting)
        oneshot(source, modifier, correlated(), tmp_path / "short")
    short = len(calls)
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", counting)
        patch.setattr(passes, "until_seen", lambda *_: contextlib.nullcontext())
        patch.setattr(passes, "rounded_once", lambda _: contextlib.nullcontext())
        oneshot(source, modifier, correlated(), tmp_path / "long")
    assert short == len(calls) - 3 * 11  # one for each layer and sample, but for the first sample
    assert_close(read(tmp_path / "short"), read(tmp_path / "long"), rtol=0, atol=0)


def test_modules_that_saw_nothing_are_rounded_to_nearest_and_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an expert that no token chose: here, a projection that is not called."""
    kind = transformers.models.llama.modeling_llama.LlamaMLP
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"])
    result = oneshot(source, modifier, correlated(), tmp_path / "q")
    idle = [name for name in result.modules if "gate_proj" in name]
    assert len(idle) == 3
    for name in idle:
        assert result.modules[name].tokens == 0
        assert result.modules[name].details["fallback"]
        assert any(note.startswith(f"{name}: rounded to nearest") for note in result.notes)
    plain = QuantizationModifier(config_groups=groups(observer="optimal"), ignore=["lm_head"])
    oneshot(source, plain, None, tmp_path / "nearest")
    ours, nearest = read(tmp_path / "q"), read(tmp_path / "nearest")
    stored = [n for n in ours if "gate_proj" in n]
    assert_close({n: ours[n] for n in stored}, {n: nearest[n] for n in stored}, rtol=0, atol=0)


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
@pytest.mark.parametrize("targets", [["Linear"], ["Linear", "Embedding"]])
def test_also_outside_of_the_layers(
    pipeline: str, targets: list[str], source: Path, tmp_path: Path
) -> None:
    """The output projection, and a pass of the whole model, have no second pass."""
    chosen = {"group_0": {**groups()["group_0"], "targets": targets}}
    modifier = GPTQModifier(config_groups=chosen)
    result = oneshot(source, modifier, correlated(), tmp_path / "q", pipeline=pipeline)
    assert result.modules["lm_head"].tokens == 6 * 64
    assert "lm_head.weight_packed" in read(tmp_path / "q")
    assert ("model.embed_tokens" in result.modules) == ("Embedding" in targets)


def test_killed_run_is_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "mark_seconds", 0.0)
    modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"])
    whole = oneshot(source, [IMatrixGatherer(), modifier], correlated(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at_mark(patch, 2)
        with pytest.raises(Stop):
            oneshot(source, [IMatrixGatherer(), modifier], correlated(), tmp_path / "q")
    result = oneshot(source, [IMatrixGatherer(), modifier], correlated(), tmp_path / "q")
    for file in (tmp_path / "whole").iterdir():
        assert lasting(tmp_path / "q" / file.name) == lasting(file), file.name
    assert result.modules == whole.modules


# -- recipes ------------------------------------------------------------------------------------


def test_recipe_of_the_seed(source: Path, tmp_path: Path) -> None:
    loaded = load_recipe(SEED)
    args = loaded.modifiers[0].config.config_groups["group_0"].weights
    assert (args.observer, args.num_bits, args.strategy) == ("mse", 4, "channel")
    assert loaded.needs_data
    oneshot(source, SEED, correlated(), tmp_path / "q")
    assert (tmp_path / "q" / "recipe.yaml").read_text() == SEED


def test_defaults() -> None:
    modifier = GPTQModifier(scheme="W4A16")
    assert (modifier.block_size, modifier.dampening_frac) == (128, 0.01)
    assert algorithm_of(modifier).needs.propagate
    args = modifier.config.config_groups["group_0"].weights
    assert (args.observer, args.actorder) == ("optimal", "static")
    chosen = GPTQModifier(scheme="W4A16", weight_observer="memoryless_mse")
    assert chosen.config.config_groups["group_0"].weights.observer == "memoryless_mse"
    written = GPTQModifier(config_groups=groups(observer="memoryless_minmax"))
    assert written.config.config_groups["group_0"].weights.observer == "memoryless_minmax"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{scheme: W4A16, block_size: 0}", "block_size"),
        ("{scheme: W4A16, dampening_frac: -1}", "dampening_frac"),
        ("{scheme: W4A16, blocksize: 64}", "block_size"),
        ("{scheme: W4A16, actorder: backwards}", "actorder"),
        pytest.param(
            "{scheme: W4A16, actorder: group}",
            "actorder: static",
            marks=pytest.mark.skipif(_stores_groups(), reason="g_idx can be stored"),
        ),
        ("{scheme: W4A16, weights: {num_bits: 4}}", "one of scheme, config_groups and weights"),
        ("{weights: {num_bits: 99}}", "num_bits"),
        ("{}", "weights"),
    ],
)
def test_mistakes(options: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(f"modifiers: {{GPTQModifier: {options}}}")


@pytest.mark.parametrize(("drift", "matrices"), [(False, 3), (True, 9)])
def test_plan_counts_the_hessians(drift: bool, matrices: int, source: Path) -> None:
    options: dict[str, Any] = {"ignore": ["lm_head"], "drift_correction": drift}
    modifier = GPTQModifier(config_groups=groups(), **options)
    plan = oneshot(source, modifier, dry_run=True).plan
    own = ("q_proj", "o_proj", "gate_proj", "down_proj")  # the others share theirs
    first = [p for p in plan.quantized if p.name.startswith("model.layers.0.")]
    widths = [p.shape[1] for p in first if p.name.endswith(own)]
    assert len(widths) == 4
    every = sum(width**2 for width in widths)
    assert plan.state_bytes == 4 * max(matrices * max(widths) ** 2, every)
    assert plan.passes == 1.5
    assert 0 < plan.waiting <= 4 * plan.tokens * (3 * 128 + 128)


def test_what_runs_one_after_another_are_the_layers(source: Path) -> None:
    options = {"config_groups": groups(), "ignore": ["lm_head"]}
    fine = GPTQModifier(sequential_targets="LlamaDecoderLayer", **options)
    assert not oneshot(source, fine, dry_run=True).plan.errors
    other = GPTQModifier(sequential_targets=["LlamaMLP"], **options)
    errors = oneshot(source, other, dry_run=True).plan.errors
    assert any("LlamaMLP" in e and "LlamaDecoderLayer" in e for e in errors)


def test_order_of_rounding_matters(source: Path, tmp_path: Path) -> None:
    for name, order in (("static", "static"), ("weight", "weight"), ("none", None)):
        modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"], actorder=order)
        oneshot(source, modifier, correlated(), tmp_path / name)
    first, second, plain = (read(tmp_path / n) for n in ("static", "weight", "none"))
    assert_close(first, second, rtol=0, atol=0)
    assert any(not torch.equal(first[n], plain[n]) for n in first)


@pytest.mark.skipif(not _stores_groups(), reason="this compressed-tensors does not store g_idx")
def test_groups_of_columns_that_lie_apart(source: Path, tmp_path: Path) -> None:
    """compressed-tensors decodes them by the stored g_idx."""
    modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"], actorder="group")
    result = oneshot(source, modifier, correlated(), tmp_path / "q")
    plain = QuantizationModifier(config_groups=groups(), ignore=["lm_head"])
    oneshot(source, plain, None, tmp_path / "nearest")
    groups_of = read(tmp_path / "q")["model.layers.0.mlp.up_proj.weight_g_idx"]
    assert torch.equal(groups_of.bincount(), torch.full((4,), 32))
    assert not torch.equal(groups_of, groups_of.sort().values)
    assert divergence(tmp_path / "q", source) < 0.8 * divergence(tmp_path / "nearest", source)
    assert all(m.details["loss"] <= m.details["nearest_loss"] for m in result.modules.values())


def test_batches_are_seen_as_they_are(source: Path, tmp_path: Path) -> None:
    """Uneven batches, without padding."""
    modifier = GPTQModifier(config_groups=groups(), ignore=["lm_head"])
    result = oneshot(source, modifier, token_batches(), tmp_path / "q")
    assert {m.tokens for m in result.modules.values()} == {2 * 24 + 24 + 3 * 11}


def test_drift_correction_is_an_option_and_reported(source: Path, tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        options = {"held_out_dampening": False, **options}
        recipe = GPTQModifier(config_groups=groups(), ignore=["lm_head"], **options)
        return oneshot(source, recipe, correlated(), tmp_path / str(len(options) - 1))

    result, plain = run(), run(drift_correction=False)
    factors = {name: each.details["drift_factor"] for name, each in result.modules.items()}
    first = {n for n in factors if n.startswith("model.layers.0.self_attn") and "o_proj" not in n}
    assert all(factors[name] == 0.0 for name in first)  # their inputs have not drifted yet
    assert all(0.0 < factors[name] <= 1.0 for name in factors.keys() - first)
    assert {each.details["drift_factor"] for each in plain.modules.values()} == {0.0}
    ours, theirs = read(tmp_path / "0"), read(tmp_path / "1")
    for name in first:
        assert torch.equal(ours[f"{name}.weight_packed"], theirs[f"{name}.weight_packed"])
    assert not any("drift" in note for note in result.notes)


@pytest.mark.parametrize(
    ("scheme", "corrected"),
    [("MXFP4", False), ("NVFP4", True), ("W8A8", True), ("MXFP4A16", True)],
)
def test_drift_of_noisy_inputs_is_not_corrected(
    scheme: str, corrected: bool, source: Path, tmp_path: Path
) -> None:
    recipe = GPTQModifier(scheme=scheme, ignore=["lm_head"])
    result = oneshot(source, recipe, token_batches(), tmp_path / "q")
    factors = [each.details["drift_factor"] for each in result.modules.values()]
    assert any(factors) == corrected
    assert sum("drift correction" in note for note in result.notes) == (not corrected)


def test_tokens_of_inputs_in_few_bits_count_alike(source: Path, tmp_path: Path) -> None:
    for weighed in (False, True):
        recipe = GPTQModifier(scheme="NVFP4", ignore=["lm_head"], token_weights=weighed)
        oneshot(source, recipe, token_batches(), tmp_path / str(weighed))
    assert_same_tensors(tmp_path / "False", tmp_path / "True")


def test_held_out_dampening_is_an_option_and_reported(source: Path, tmp_path: Path) -> None:
    def run(**options: Any) -> dict[str, float]:
        recipe = GPTQModifier(config_groups=groups(), ignore=["lm_head"], **options)
        result = oneshot(source, recipe, token_batches(), tmp_path / str(len(options)))
        assert not any("dampening" in note for note in result.notes)
        return {name: each.details["dampening_frac"] for name, each in result.modules.items()}

    fixed, chosen = run(held_out_dampening=False), run()
    assert set(fixed.values()) == {0.01}
    allowed = [step * 0.01 for step in STEPS]
    assert all(any(frac == pytest.approx(each) for each in allowed) for frac in chosen.values())
    assert max(chosen.values()) > 0.01  # 105 tokens are few for 64 and 128 columns
    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn"):  # one input, one choice
        assert len({chosen[f"{layer}.{name}_proj"] for name in "qkv"}) == 1


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"pipeline": "basic"}, "in the model, since its modules are not solved in the order"),
        ({"propagate_error": False}, "in model.layers.0, since its modules are not solved in"),
    ],
)
def test_modules_without_drift_correction_are_noted(
    options: dict[str, Any], note: str, source: Path, tmp_path: Path
) -> None:
    recipe = GPTQModifier(config_groups=groups(), ignore=["lm_head"])
    result = oneshot(source, recipe, correlated(), tmp_path / "q", **options)
    assert len([each for each in result.notes if f"no drift correction {note}" in each]) == 1
    assert {each.details["drift_factor"] for each in result.modules.values()} == {0.0}
