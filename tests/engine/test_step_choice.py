"""Rotations are measured beside no rotation, and kept where the rounded model is better with them.

A channel of the residual stream with huge values harms scales per token, which a rotation mends. It
harms no other group where groups have scales of their own, until a rotation spreads it over them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import assert_same_tensors, small_model
from forked import start_forked
from interruption import Stop, small_steps, stop_at_mark
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.engine import step_choice
from steelyard.engine.step_choice import best_of
from steelyard.evaluate import evaluate
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, Modifier, QuantizationModifier
from steelyard.modifiers.bit_budget import BitBudgetModifier
from steelyard.modifiers.spinquant import SpinQuantModifier
from steelyard.recipes import load_recipe

WEIGHTS = {"num_bits": 8, "strategy": "channel", "observer": "memoryless_minmax"}
PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
W8A8 = {"all": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": PER_TOKEN}}
SCHEMES: dict[str, dict[str, Any]] = {
    "W8A8": {"config_groups": W8A8, "ignore": ["lm_head"]},
    "NVFP4": {"scheme": "NVFP4", "ignore": ["lm_head"]},
    "MXFP4": {"scheme": "MXFP4", "ignore": ["lm_head"]},
}


def steps(kind: str, *before: Modifier, last: Any = QuantizationModifier) -> list[Modifier]:
    return [*(before or [SpinQuantModifier()]), last(**SCHEMES[kind])]


def rows(number: int = 12) -> list[list[int]]:
    chance = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (24,), generator=chance).tolist() for _ in range(number)]


def with_a_huge_channel(family: str = "llama", **changes: Any) -> Any:
    model = small_model(family, torch.float32, num_hidden_layers=2, **changes)
    embedding = model.get_input_embeddings().weight.data
    embedding[:, 5] = 60 * embedding.std()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # gains, for which the other channels matter in spite of it
            parameter.data.fill_(8)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    with_a_huge_channel(tie_word_embeddings=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def declined(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "q"
    oneshot(source, steps("NVFP4"), rows(), out)
    return out


def said(result: Any) -> str:
    notes = result.chosen if hasattr(result, "chosen") else result.notes
    (line,) = (note for note in notes if note.startswith("SpinQuantModifier") and "sampl" in note)
    return str(line)


# -- the choice -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "last", "rotated"),
    [
        ("W8A8", QuantizationModifier, True),
        ("W8A8", GPTQModifier, True),
        ("NVFP4", QuantizationModifier, False),
        ("NVFP4", GPTQModifier, False),
    ],
)
def test_r1_is_taken_where_it_helps(kind: str, last: Any, rotated: bool, source: Path) -> None:
    plan = oneshot(source, steps(kind, last=last), rows(), dry_run=True).plan
    line = said(plan)
    assert line.startswith("SpinQuantModifier: R1 and R2.") == rotated
    rounded = "inputs and weights" if last is QuantizationModifier else "inputs"
    assert f"on 8 samples with {rounded} rounded: R1 and R2 0." in line.replace("R2 1.", "R2 0.")
    assert bool(plan.untied) == rotated
    assert not any("R1" in warning for warning in plan.warnings)


@pytest.mark.parametrize("kind", ["W8A8", "NVFP4"])
def test_a_loaded_module_gets_the_same_choice(kind: str, source: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(source)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    lines = [said(oneshot(m, steps(kind), rows(), dry_run=True).plan) for m in (source, loaded)]
    assert lines[0] == lines[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.config.tie_word_embeddings and not loaded.lm_head._forward_pre_hooks


@pytest.mark.parametrize("last", [QuantizationModifier, GPTQModifier])
def test_a_declined_rotation_leaves_the_bytes_of_the_other_steps(
    last: Any, source: Path, tmp_path: Path
) -> None:
    oneshot(source, steps("NVFP4", last=last), rows(), tmp_path / "declined")
    text = (tmp_path / "declined" / "recipe.yaml").read_text()
    assert "# SpinQuantModifier: no rotation. " in text
    (step,) = load_recipe(tmp_path / "declined" / "recipe.yaml").modifiers
    assert type(step) is last
    oneshot(source, steps("NVFP4", last=last)[1:], rows(), tmp_path / "q")
    assert_same_tensors(tmp_path / "declined", tmp_path / "q")


def test_a_taken_rotation_is_the_one_without_the_check(source: Path, tmp_path: Path) -> None:
    ordered: dict[str, Any] = {"shuffle_calibration_samples": False}
    result = oneshot(source, steps("W8A8"), rows(), tmp_path / "q", **ordered)
    plain = steps("W8A8", SpinQuantModifier(held_out_check=False))
    assert not oneshot(source, plain, None, tmp_path / "unchecked").plan.chosen
    assert_same_tensors(tmp_path / "q", tmp_path / "unchecked")
    oneshot(source, tmp_path / "q" / "recipe.yaml", None, tmp_path / "again")
    assert_same_tensors(tmp_path / "q", tmp_path / "again")
    texts = [{"input_ids": torch.tensor([row])} for row in rows()]
    texts = [texts[i * 12 // 8] for i in range(8)]
    found = evaluate(source, tmp_path / "q", texts, num_samples=8, max_seq_length=24)
    measured = float(said(result).partition("R1 and R2 ")[2].split()[0])
    assert measured == pytest.approx(found.kl_divergence, rel=0.1)


def test_r2_alone_and_r4(source: Path) -> None:
    plan = oneshot(source, steps("W8A8", SpinQuantModifier(rotations=["R2"])), rows(), dry_run=True)
    assert "R1" not in said(plan.plan) and "no rotation 0." in said(plan.plan)
    modifier = SpinQuantModifier(rotations=["R1", "R4"], transform_type="random-hadamard")
    line = said(oneshot(source, steps("W8A8", modifier), rows(), dry_run=True).plan)
    assert line.startswith("SpinQuantModifier: R1 and R4.") and ", R4 0." in line


def test_columns_weighed_by_importance(source: Path) -> None:
    """Whose statistics the number of threads does not change."""
    recipe = [SpinQuantModifier(), IMatrixGatherer(), QuantizationModifier(scheme="W4A16")]
    recipe[-1] = QuantizationModifier(
        config_groups={
            "all": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "group", "group_size": 16},
            }
        },
        ignore=["lm_head"],
    )
    lines = [said(oneshot(source, recipe, rows(), dry_run=True).plan) for _ in range(2)]
    assert lines[0] == lines[1] and "with weights rounded" in lines[0]
    unweighed = said(oneshot(source, [recipe[0], recipe[2]], rows(), dry_run=True).plan)
    assert unweighed != lines[0]


def test_after_a_bit_budget(source: Path, tmp_path: Path) -> None:
    recipe = [BitBudgetModifier(bits=6, bit_widths=[4, 8, 16]), *steps("W8A8")]
    oneshot(source, recipe, rows(), tmp_path / "q")
    comments = [
        line
        for line in (tmp_path / "q" / "recipe.yaml").read_text().split("\n")
        if line.startswith("# ")
    ]
    assert comments[0].startswith("# bit budget: ")
    assert any(line.startswith("# SpinQuantModifier: ") for line in comments)


def test_a_gain_within_noise_is_not_taken() -> None:
    none = [1.0, 1.2, 0.8, 1.0]
    assert best_of({"R1": [0.9, 1.1, 0.7, 0.9], "no rotation": none}) == "R1"
    assert best_of({"R1": [0.5, 1.6, 0.9, 0.9], "no rotation": none}) == "no rotation"
    both = {"R1": [0.9, 1.1, 0.7, 0.9], "R2": [0.8, 1.0, 0.6, 0.8], "no rotation": none}
    assert best_of(both) == "R2"


# -- what is not measured ---------------------------------------------------------------------


def test_without_data_the_plan_warns(source: Path) -> None:
    plan = oneshot(source, steps("MXFP4"), dry_run=True).plan
    assert not plan.chosen and any("Pass calibration data" in each for each in plan.warnings)


def test_where_nothing_is_rounded_ahead(source: Path) -> None:
    recipe = [SpinQuantModifier(), GPTQModifier(scheme="W4A16", group_size=16, ignore=["lm_head"])]
    plan = oneshot(source, recipe, rows(), dry_run=True).plan
    assert said(plan).endswith("GPTQModifier makes up for the rounding of weights")
    assert "lm_head" in plan.untied


def test_data_that_cannot_be_measured(source: Path) -> None:
    lines = [said(oneshot(source, steps("W8A8"), data, dry_run=True).plan) for data in ([[7]] * 8,)]
    assert lines == ["SpinQuantModifier was not compared on samples: no sample has two tokens"]


def test_a_generator_is_read_once(declined: Path, source: Path, tmp_path: Path) -> None:
    oneshot(source, steps("NVFP4"), (row for row in rows()), tmp_path / "q")
    assert_same_tensors(declined, tmp_path / "q")


# -- one answer -------------------------------------------------------------------------------


def test_a_resumed_run_keeps_the_choice(
    declined: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_steps():
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_at_mark(patch, 2)
            oneshot(source, steps("NVFP4"), rows(), tmp_path / "q")
        monkeypatch.delattr(step_choice.StepChoice, "choose")  # it would have to measure again
        result = oneshot(source, steps("NVFP4"), rows(), tmp_path / "q")
    assert any(note.startswith("resumed after") for note in result.notes)
    assert "no rotation." in said(result)
    assert_same_tensors(declined, tmp_path / "q")


def rank_of_two(rank: int, source: Path, folder: Path) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=2, store=dist.FileStore(str(folder / "store"), 2)
    )
    for kind in ("NVFP4", "W8A8"):
        oneshot(source, steps(kind), rows(), folder / f"ranks-{kind}")
    dist.destroy_process_group()


def test_ranks_write_the_same_bytes(declined: Path, source: Path, tmp_path: Path) -> None:
    processes = [start_forked(rank_of_two, rank, source, tmp_path) for rank in range(2)]
    oneshot(source, steps("W8A8"), rows(), tmp_path / "taken")
    for process in processes:
        process.join(240)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    assert_same_tensors(declined, tmp_path / "ranks-NVFP4")
    assert_same_tensors(tmp_path / "taken", tmp_path / "ranks-W8A8")


def test_experts_of_a_module_and_a_folder(tmp_path: Path) -> None:
    with_a_huge_channel("qwen3_moe").save_pretrained(tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    lines = [
        said(oneshot(each, steps("W8A8"), rows(), dry_run=True).plan)
        for each in (tmp_path / "m", loaded)
    ]
    assert lines[0] == lines[1] and lines[0].startswith("SpinQuantModifier: R1 and R2.")
