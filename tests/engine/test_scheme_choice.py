"""A bit budget becomes config groups of the step that quantizes: in any kind of run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import assert_same_tensors, small_model
from interruption import Stop, small_steps, stop_at_mark
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.algorithms import rounding_ahead
from steelyard.doctor import examine
from steelyard.engine import scheme_choice
from steelyard.errors import DataError, PlanError, RecipeError
from steelyard.modifiers import GPTQModifier, Modifier, QuantizationModifier
from steelyard.modifiers.bit_budget import BitBudgetModifier
from steelyard.recipes import load_recipe

QUICK: dict[str, Any] = {
    "scheme": "W4A16",
    "group_size": 16,
    "ignore": ["lm_head"],
    "weight_observer": "memoryless_minmax",
}


def budget(bits: float | None = 5.0, **options: Any) -> list[Modifier]:
    options.setdefault("bit_widths", [4, 8, 16])
    return [BitBudgetModifier(bits=bits, **options), QuantizationModifier(**QUICK)]


def rows(count: int = 8) -> list[list[int]]:
    chance = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (24,), generator=chance).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama", num_hidden_layers=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "q"
    oneshot(source, budget(), rows(), out)
    return out


def widths(folder: Path) -> dict[str, int]:
    """Return the bits of each module of a layer, read from the shapes in the files alone."""
    from safetensors import safe_open

    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            for name in (n for n in names if ".layers." in n):
                module, _, leaf = name.rpartition(".")
                if leaf == "weight_packed":
                    columns = int(tensors.get_tensor(f"{module}.weight_shape")[1])
                    found[module] = 32 * tensors.get_slice(name).get_shape()[1] // columns
                elif leaf == "weight" and module.endswith("_proj"):
                    found[module] = 16
    return found


def average(folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    bits = widths(folder)
    sizes = {
        name: module.in_features * module.out_features
        for name, module in model.named_modules()
        if name in bits
    }
    return sum(sizes[name] * bits[name] for name in bits) / sum(sizes.values())


def test_the_checkpoint_keeps_the_budget(written: Path) -> None:
    bits = widths(written)
    assert len(bits) == 21
    assert 4.5 < average(written) <= 5
    assert set(bits.values()) >= {4, 8}
    for layer in range(3):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        assert len({bits[f"{attention}.{leaf}_proj"] for leaf in "qkv"}) == 1
        assert bits[f"{mlp}.gate_proj"] == bits[f"{mlp}.up_proj"]


def test_recipe_report_and_notes_state_the_choice(written: Path, source: Path) -> None:
    text = (written / "recipe.yaml").read_text()
    assert "# bit budget: " in text and "BitBudgetModifier" not in text
    (modifier,) = load_recipe(written / "recipe.yaml").modifiers
    assert isinstance(modifier, QuantizationModifier)
    assert "w8a16" in modifier.config.config_groups
    report = json.loads((written / "report.json").read_text())
    assert any(note.startswith("bit budget: ") for note in report["notes"])
    assert any("with 4 bits in all units" in note for note in report["notes"])
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    found = [group["weights"]["num_bits"] for group in config["config_groups"].values()]
    assert found == [8, 4]  # `Linear` last: it would hide the targets of groups after it


def test_vllm_reads_fused_layers_as_they_are_stored(written: Path, source: Path) -> None:
    """Not under `Linear`, which it tries before the parts of a fused layer."""
    assert len(set(widths(written).values())) > 1
    assert examine(written, source).findings.problems == []


def test_loading_it_logs_no_unmatched_targets(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AutoModelForCausalLM.from_pretrained(written)
    assert "Could not match" not in caplog.text


def test_the_written_recipe_gives_the_same_bytes(
    written: Path, source: Path, tmp_path: Path
) -> None:
    oneshot(source, written / "recipe.yaml", None, tmp_path / "again")
    assert_same_tensors(written, tmp_path / "again")


def test_a_loaded_module_gets_the_same_choice(written: Path, source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = oneshot(model, budget(), rows(), dry_run=True).plan
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert plan.chosen[0].startswith("bit budget: ")
    assert str(plan).count(plan.chosen[0]) == 1
    oneshot(model, budget(), rows(), tmp_path / "q")
    assert_same_tensors(written, tmp_path / "q")


def test_a_resumed_run_keeps_the_choice(
    written: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_steps():
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_at_mark(patch, 3)
            oneshot(source, budget(), rows(), tmp_path / "q")
        monkeypatch.delattr(scheme_choice.UnitChoice, "choose")  # it would have to choose again
        result = oneshot(source, budget(), rows(), tmp_path / "q")
    assert any(note.startswith("resumed after") for note in result.notes)
    assert any(note.startswith("bit budget: ") for note in result.notes)
    assert_same_tensors(written, tmp_path / "q")


def test_without_data_weights_decide(source: Path, tmp_path: Path) -> None:
    result = oneshot(source, budget(4.5), None, tmp_path / "q")
    assert "chosen by the errors of weights alone, since there is no data" in result.notes
    assert 4 < average(tmp_path / "q") <= 4.5


@pytest.mark.parametrize("kind", [QuantizationModifier, GPTQModifier])
def test_by_default_all_widths_that_vllm_serves_on_cuda(
    kind: type[Modifier], source: Path, tmp_path: Path
) -> None:
    result = oneshot(source, [BitBudgetModifier(bits=5), kind(**QUICK)], rows(), tmp_path / "q")
    used = set(widths(tmp_path / "q").values())
    assert used <= {4, 5, 6, 8, 16} and used & {5, 6}
    assert 4.5 < average(tmp_path / "q") <= 5
    (served,) = (note for note in result.notes if "on CUDA alone" in note)
    assert served.endswith("bit_widths 4, 8, 16 keeps to widths that it serves everywhere")
    report = json.loads((tmp_path / "q" / "report.json").read_text())
    assert served in report["notes"]
    rounding = "as GPTQ rounds them" if kind is GPTQModifier else "rounded to nearest"
    assert any(f"with weights {rounding}" in note for note in report["notes"])


def test_without_room_for_rounded_weights_predictions_decide(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [BitBudgetModifier(bits=5), GPTQModifier(**QUICK)]
    measured = oneshot(source, steps, rows(), dry_run=True).plan
    monkeypatch.setattr(rounding_ahead, "default_memory", lambda: 0)
    spilled = oneshot(source, steps, rows(), dry_run=True).plan  # in files instead of memory
    assert spilled.chosen == measured.chosen
    full = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(rounding_ahead.shutil, "disk_usage", lambda folder: full)
    plan = oneshot(source, steps, rows(), dry_run=True).plan
    assert plan.chosen[1].startswith("predicted KL divergence 0.")
    limit = [BitBudgetModifier(max_kl=0.1), GPTQModifier(**QUICK)]
    with pytest.raises(PlanError, match="set TMPDIR to a larger disk"):
        oneshot(source, limit, rows(), dry_run=True)


def test_with_gptq_and_other_widths(source: Path, tmp_path: Path) -> None:
    steps = [BitBudgetModifier(bits=5, bit_widths=[3, 5, 6]), GPTQModifier(**QUICK)]
    oneshot(source, steps, rows(), tmp_path / "q")
    assert set(widths(tmp_path / "q").values()) <= {3, 5, 6}
    assert average(tmp_path / "q") <= 5


def test_all_experts_of_a_layer_get_one_scheme(tmp_path: Path) -> None:
    small_model("qwen3_moe", num_hidden_layers=3).save_pretrained(tmp_path / "m")
    oneshot(tmp_path / "m", budget(5, bit_widths=[4, 5, 8]), rows(), tmp_path / "q")
    bits = widths(tmp_path / "q")
    assert len(set(bits.values())) > 1
    for layer in range(3):
        inside = {b for n, b in bits.items() if f"layers.{layer}.mlp.experts." in n}
        assert len(inside) == 1


def test_only_targets_change(source: Path) -> None:
    plan = oneshot(source, budget(4.9, targets=["re:.*mlp.*"]), None, dry_run=True).plan
    larger = {p.name for p in plan.quantized if p.scheme.weights.num_bits == 8}
    assert larger and all(".mlp." in name for name in larger)


def test_fewest_bits_for_a_divergence(source: Path) -> None:
    plans = {
        limit: oneshot(source, budget(None, max_kl=limit), rows(), dry_run=True).plan
        for limit in (1e-3, 0.05)
    }
    bits = {limit: float(plan.chosen[0].split()[2]) for limit, plan in plans.items()}
    assert 4 <= bits[0.05] < bits[1e-3] < 16
    for limit, plan in plans.items():
        assert float(plan.chosen[1].split()[2].rstrip(":")) <= limit


@pytest.mark.parametrize(
    ("steps", "data", "kind", "problem"),
    [
        (budget(3.9), None, PlanError, "3.9 bits per weight are fewer than the 4"),
        (budget(16), None, PlanError, "leave nothing to choose"),
        (budget(9, bit_widths=[4, 8]), None, PlanError, "the largest schemes take 8"),
        (budget(5, targets=["lm_head"]), None, PlanError, "no module in a layer"),
        (budget(None, max_kl=0.1), None, DataError, "pass dataset=, or give bits"),
        (budget(), rows(1), DataError, "needs 2 samples of two tokens or more"),
        ([budget()[0]], None, RecipeError, "the recipe has none"),
        ([budget()[0], *budget()], None, RecipeError, "two BitBudgetModifier"),
        (
            [*budget(), GPTQModifier(scheme="W8A16", targets=["lm_head"])],
            None,
            RecipeError,
            "the recipe has QuantizationModifier, GPTQModifier",
        ),
    ],
)
def test_refusals(
    source: Path, steps: list[Modifier], data: Any, kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind, match=problem):
        oneshot(source, steps, data, dry_run=True)
