"""AutoRound through `oneshot`: never worse than its start, and stored as it was tuned."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import saved
from families import assert_same_tensors, small_model
from interruption import Stop, lasting, stop_at_mark
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.algorithms import Algorithm
from steelyard.algorithms.autoround import _pull
from steelyard.algorithms.tuned_block import _rounded
from steelyard.checkpoint import CheckpointWriter
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.engine import layer_run
from steelyard.errors import PlanError, RecipeError
from steelyard.modifiers import GPTQModifier
from steelyard.modifiers.autoround import AutoRoundModifier
from steelyard.recipes import load_recipe

FEW = {"iters": 6, "batch_size": 4, "lr": 0.05}
NEAREST = {"dampening_frac": 1e6, "refinements": 0, "drift_correction": False}
"""GPTQ that makes up for nothing: a start that any tuning must improve."""
START = {"iters": 1, "lr": 1e-9}
"""Steps too small to change a code: the start of tuning."""
IN_ORDER = {"shuffle_calibration_samples": False}
HELD_OUT = [1, 9]


def groups(**args: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, **args}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


SCHEMES: dict[str, dict[str, Any]] = {
    "int4": groups(),
    "int4 asymmetric": groups(symmetric=False),
    "int3 channel": groups(num_bits=3, strategy="channel", group_size=None),
    "W8A8": {"scheme": "W8A8"},
    "FP8": {"scheme": "FP8"},
    "NVFP4A16": {"scheme": "NVFP4A16"},
    "MXFP4A16": {"scheme": "MXFP4A16"},
}


WITH_ACTIVATIONS = ("W8A8", "FP8")


def data(seed: int = 0, batches: int = 9) -> list[torch.Tensor]:
    """Few different tokens, so that the inputs of layers are far from independent."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 24, (2, 24), generator=generator) for _ in range(batches)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama", num_hidden_layers=2).save_pretrained(folder)
    return folder


@torch.no_grad()
def first_layer(source: Path, batch: torch.Tensor, quantized: Path | None = None) -> torch.Tensor:
    """Return the output of the first layer, as transformers computes it with decoded weights."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if quantized is not None:
        written = WrittenCheckpoint(quantized, None)
        for name in written.schemes:
            weight = model.get_parameter(f"{name}.weight").data
            for start, rows in written.decode(name):
                weight[start : start + len(rows)] = rows
    return model(batch, output_hidden_states=True).hidden_states[1].double()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_never_worse_than_its_start_and_stored_as_tuned(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    """The first layer's input is the same in all models."""
    options = {"ignore": ["lm_head"], **SCHEMES[scheme]}
    modifier = AutoRoundModifier(**options, **FEW)
    result = oneshot(source, modifier, data(), tmp_path / "q", **IN_ORDER)
    start = AutoRoundModifier(**options, **START)
    oneshot(source, start, data(), tmp_path / "start", **IN_ORDER)
    details = result.modules["model.layers.0.mlp.up_proj"].details
    losses = details["held_out_loss"]
    assert (losses[1] < losses[0]) == (details["tuning_step"] > 0)
    assert losses[1] <= losses[0]
    if scheme in WITH_ACTIVATIONS:
        return
    held_out = torch.cat(data())[HELD_OUT]
    expected = first_layer(source, held_out)
    squares = expected.square().mean(-1)
    outputs = (first_layer(source, held_out, tmp_path / name) for name in ("start", "q"))
    found = [((each - expected).square().mean(-1) / squares).sum() for each in outputs]
    assert_close(losses, [float(each) for each in found], rtol=0.01, atol=0)


def test_the_start_knows_nothing_of_held_out_samples(source: Path, tmp_path: Path) -> None:
    """Else it is fitted to the samples that judge it, and no state is better."""
    modifier = AutoRoundModifier(**groups(), ignore=["lm_head"], **START)
    samples = torch.cat(data())
    others = samples.clone()
    others[HELD_OUT] = torch.cat(data(seed=1))[HELD_OUT]
    for name, each in (("a", samples), ("b", others)):
        oneshot(source, modifier, list(each.split(1)), tmp_path / name, **IN_ORDER)
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


def test_pull_leads_to_the_best_value_of_one_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator).double()
    off = torch.randn(3, 6, generator=generator).double()
    pull = _pull(off, x.T @ x, 0.0)
    for column in range(6):
        alone = off.clone()
        alone[:, column] -= pull[:, column]
        expected = torch.zeros(3, dtype=torch.float64)
        assert_close((alone @ x.T @ x)[:, column], expected, rtol=0, atol=1e-9)


def test_tuning_lowers_the_error(source: Path, tmp_path: Path) -> None:
    modifier = AutoRoundModifier(**groups(), **NEAREST, ignore=["lm_head"], iters=20)
    result = oneshot(source, modifier, data(), tmp_path / "q", **IN_ORDER)
    losses = [module.details["held_out_loss"] for module in result.modules.values()]
    assert all(after < 0.95 * before for before, after in losses)


def test_without_steps_it_is_gptq(source: Path, tmp_path: Path) -> None:
    options = {**groups(), "ignore": ["lm_head"]}
    oneshot(source, AutoRoundModifier(**options, iters=0), data(), tmp_path / "q")
    oneshot(source, GPTQModifier(**options), data(), tmp_path / "gptq")
    assert_same_tensors(tmp_path / "q", tmp_path / "gptq")


def test_what_cannot_be_tuned_is_gptqs_and_noted(source: Path, tmp_path: Path) -> None:
    """One batch leaves none to hold out; a head has no original output to come close to."""
    options, one = groups(), data(batches=1)[0].reshape(1, -1)
    result = oneshot(source, AutoRoundModifier(**options, **FEW), [one], tmp_path / "q")
    oneshot(source, GPTQModifier(**options), [one], tmp_path / "gptq")
    assert_same_tensors(tmp_path / "q", tmp_path / "gptq")
    noted = "rounded by GPTQ and not tuned, since"
    assert f"model.layers.1: {noted} it has one batch of data" in result.notes
    assert f"lm_head: {noted} it is outside of the layers" in result.notes


def test_padding_does_not_count(source: Path, tmp_path: Path) -> None:
    """Other tokens behind the mask change nothing."""
    made = []
    for name, padding in (("a", 5), ("b", 17)):
        samples = []
        for batch in data(batches=4):
            mask = torch.ones_like(batch)
            mask[1, 12:] = 0
            samples.append(
                {"input_ids": batch.masked_fill(mask == 0, padding), "attention_mask": mask}
            )
        modifier = AutoRoundModifier(**groups(), ignore=["lm_head"], **FEW)
        made.append(oneshot(source, modifier, samples, tmp_path / name))
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    losses = [m.details["held_out_loss"] for m in made[0].modules.values()]
    assert losses == [m.details["held_out_loss"] for m in made[1].modules.values()]


def test_experts(tmp_path: Path) -> None:
    source = saved("qwen3_moe", tmp_path / "m")
    modifier = AutoRoundModifier(**groups(group_size=16), **NEAREST, ignore=["lm_head"], iters=20)
    result = oneshot(source, modifier, data(), tmp_path / "q", **IN_ORDER)
    experts = [m.details for name, m in result.modules.items() if ".experts." in name]
    assert experts and all(d["held_out_loss"][1] < d["held_out_loss"][0] for d in experts)


def test_killed_run_is_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "mark_seconds", 0.0)
    modifier = AutoRoundModifier(**groups(), ignore=["lm_head"], **FEW)
    whole = oneshot(source, modifier, data(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at_mark(patch, 1)
        with pytest.raises(Stop):
            oneshot(source, modifier, data(), tmp_path / "q")
    result = oneshot(source, modifier, data(), tmp_path / "q")
    for file in (tmp_path / "whole").iterdir():
        assert lasting(tmp_path / "q" / file.name) == lasting(file), file.name
    assert result.modules == whole.modules


def test_progress_within_a_block(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[float, str]] = []
    totals: list[float] = []

    class Shown:
        def __init__(self, label: str, total: float, *more: Any) -> None:
            totals.append(total)

        def __enter__(self) -> Any:
            return lambda amount=1, where="": shown.append((amount, where))

        def __exit__(self, *exc: object) -> None:
            pass

    monkeypatch.setattr(layer_run, "progress", Shown)
    modifier = AutoRoundModifier(**groups(), ignore=["lm_head"], **FEW)
    oneshot(source, modifier, data(batches=3), tmp_path / "q")
    assert [where for _, where in shown if "layers.1" in where] == [
        f"tuning model.layers.1, step {step} of 6" for step in range(1, 7)
    ]
    done = sum(amount for amount, _ in shown)
    assert done == pytest.approx(totals[0] - 6)  # the rest of the model needs no batches


def test_sums_of_rounded_gradients_have_no_order() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-12, 3, 64).unsqueeze(1)
    gradients = [torch.randn(64, 8, generator=generator) * sizes for _ in range(9)]
    unit = 2.0**-20
    pieces = [_rounded(gradient, unit) for gradient in gradients]
    expected = torch.stack(pieces).sum(0)
    for seed in range(5):
        order = random.Random(seed).sample(range(9), 9)
        total = torch.zeros_like(expected)
        for index in order:
            total += pieces[index]
        assert torch.equal(total, expected)
    exact = torch.stack(gradients).double().sum(0)
    assert_close(expected, exact, rtol=0, atol=9 * unit / 2)


# -- recipes ------------------------------------------------------------------------------------


def test_defaults_are_those_of_llm_compressor() -> None:
    from steelyard.modifiers.autoround import AutoRoundModifier as Imported

    modifier = load_recipe("AutoRoundModifier: {scheme: W4A16, ignore: [lm_head]}").modifiers[0]
    assert type(modifier) is Imported
    options = modifier.model_dump()
    expected = {"iters": 200, "batch_size": 8, "lr": None, "enable_torch_compile": True}
    assert {key: options[key] for key in expected} == expected
    assert not Algorithm.registry.get("autoround").streams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("iters: -1", "iters"),
        ("lr: 0", "lr"),
        ("disable_opt_rtn: true", "tuning starts from GPTQ's codes"),
        ("nblocks: 2", "nblocks"),
    ],
)
def test_mistakes(options: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(f"AutoRoundModifier: {{scheme: W4A16, {options}}}")


def test_the_model_as_a_whole_is_refused(source: Path, tmp_path: Path) -> None:
    modifier = AutoRoundModifier(**groups(), ignore=["lm_head"])
    with pytest.raises(PlanError, match="works block by block"):
        oneshot(source, modifier, data(), tmp_path / "q", pipeline="basic")
