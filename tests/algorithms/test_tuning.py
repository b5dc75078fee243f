"""Tuning moves stored scales, norm gains and biases towards the original, or nothing at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import oracle, weights
from families import read, small_model
from hypothesis import given
from hypothesis import strategies as st

from steelyard import oneshot
from steelyard.algorithms.guard import Guard
from steelyard.algorithms.tunables import Tunable
from steelyard.errors import DataError, PlanError
from steelyard.modifiers import IMatrixGatherer, QuantizationModifier
from steelyard.modifiers.tuning import TuningModifier
from steelyard.recipes import load_recipe

SIZE = {"num_calibration_samples": 32, "max_seq_length": 24, "shuffle_calibration_samples": False}
W3 = {"config_groups": {"group_0": weights(num_bits=3, strategy="group", group_size=32)}}


def rows(count: int = 32) -> list[list[int]]:
    chance = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (24,), generator=chance).tolist() for _ in range(count)]


def run(source: Path, out: Path, tuning: TuningModifier | None, **scheme: Any) -> Any:
    recipe: list[Any] = [QuantizationModifier(ignore=["lm_head"], **(scheme or W3))]
    if not scheme:
        recipe.insert(0, IMatrixGatherer())  # so that the data is used without tuning, too
    data = [{"input_ids": row} for row in rows()]
    return oneshot(source, [*recipe, *([tuning] if tuning else [])], data, out, **SIZE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    model = small_model("qwen2", num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # of zeros, which stay
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def untuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untuned") / "q"
    run(model, out, None)
    return out


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("tuned") / "q"
    return out, run(model, out, TuningModifier(lr=1e-3, epochs=3))


def test_divergence_falls_on_held_out_samples(
    model: Path, untuned: Path, tuned: tuple[Path, Any]
) -> None:
    """The two figures of the report are those that transformers finds."""
    out, result = tuned
    note = next(note for note in result.notes if note.startswith("TuningModifier: KL"))
    before, after = (float(each) for each in re.findall(r"([\d.]+) -> ([\d.]+)", note)[0])
    assert after < before
    held_out = rows()[7::8]
    with_last = [[*row, 3] for row in held_out]  # the oracle leaves out the last of a row
    for folder, figure in ((untuned, before), (out, after)):
        assert oracle(model, folder, with_last)["kl_divergence"] == pytest.approx(figure, rel=1e-3)


def test_only_scales_gains_and_biases_change(untuned: Path, tuned: tuple[Path, Any]) -> None:
    out, result = tuned
    before, after = read(untuned), read(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    kinds = {name.split(".")[-2].rpartition("_")[2] + "." + name.split(".")[-1] for name in changed}
    assert kinds == {"proj.weight_scale", "layernorm.weight", "norm.weight", "proj.bias"}
    assert all(before[name].dtype == after[name].dtype for name in changed)
    plain = {name for name in changed if not name.endswith("scale")}
    assert set(result.changed) == plain
    assert "TuningModifier" in (out / "recipe.yaml").read_text()


def test_a_destructive_rate_leaves_the_bytes_of_the_start(
    model: Path, untuned: Path, tmp_path: Path
) -> None:
    result = run(model, tmp_path / "q", TuningModifier(lr=0.4))
    assert any("changed nothing" in note for note in result.notes)
    assert result.changed == []
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "q" / name).read_bytes() == (untuned / name).read_bytes()


FIXED = {"MXFP4A16": "powers of two", "FP8": "one scale for the whole tensor"}


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "NVFP4", "FP8_DYNAMIC", *FIXED])
def test_schemes_with_quantized_inputs_and_fixed_scales(scheme: str, tmp_path: Path) -> None:
    """The run validates what it wrote; inputs round as in transformers, and gradients pass."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    small_model("llama", **sizes).save_pretrained(tmp_path / "m")
    result = run(tmp_path / "m", tmp_path / "q", TuningModifier(epochs=1), scheme=scheme)
    assert any("TuningModifier" in note and "KL" in note for note in result.notes)
    assert ("leaves the scales" in str(result.notes)) == (scheme in FIXED)
    assert FIXED.get(scheme, "") in str(result.notes)


# -- one tensor -----------------------------------------------------------------------------------


@given(
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    block=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    cut=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]),
)
def test_a_scale_changes_its_block(
    blocks: tuple[int, int],
    block: tuple[int, int],
    cut: tuple[int, int],
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Value and gradient are those of codes times s (1 + d), written out for each weight."""
    chance = torch.Generator().manual_seed(seed)
    rows = blocks[0] * block[0] - min(cut[0], block[0] - 1)
    columns = blocks[1] * block[1] - min(cut[1], block[1] - 1)
    scale = (torch.randn(blocks, generator=chance).abs() + 0.1).to(dtype)
    codes = torch.randint(-8, 8, (rows, columns), generator=chance).float()
    tunable = Tunable("w", scale.float(), dtype, block)
    tunable.change = torch.rand(blocks, generator=chance) - 0.5
    wide = scale.float() * (1 + tunable.change)
    assert torch.equal(tunable.stored().float(), wide.to(dtype).float())

    change = tunable.change.double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    weight = torch.empty_like(codes)
    slope = torch.randn(rows, columns, generator=chance)
    for i in range(rows):
        for j in range(columns):
            place = (i // block[0], j // block[1])
            weight[i, j] = codes[i, j] * tunable.stored().float()[place]
            exact = codes[i, j].double() * scale[place].double() * (1 + change[place])
            loss = loss + slope[i, j] * exact
    loss.backward()
    decoded = (
        codes
        * scale.float()
        .repeat_interleave(block[0], 0)[:rows]
        .repeat_interleave(block[1], 1)[:, :columns]
    )
    torch.testing.assert_close(tunable.value(decoded), weight)
    assert change.grad is not None
    torch.testing.assert_close(
        tunable.gradient(decoded, slope).double(), change.grad, rtol=1e-4, atol=1e-4
    )


def test_a_scale_is_never_zero_and_an_empty_group_stays() -> None:
    smallest = torch.tensor([[2.0**-9, 0.0, 448.0]])
    tunable = Tunable("w", smallest, torch.float8_e4m3fn, (1, 1))
    tunable.change = torch.tensor([[-0.5, 0.5, 0.5]])
    assert tunable.stored().float().tolist() == [[2.0**-9, 0.0, 448.0]]
    assert tunable.value(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 1.0]]


# -- the guard ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "won"),
    [
        ([0.9, 1.9, 2.9], True),  # the same from all
        ([0.1, 2.2, 3.2], False),  # much from one, and a loss on the others
        ([1.1, 2.1, 3.1], False),
        ([1.0, 2.0, 3.0], False),
    ],
)
def test_a_gain_within_noise_is_none(after: list[float], won: bool) -> None:
    tunable = Tunable("w", torch.ones(2), torch.bfloat16, None)
    guard = Guard([tunable], [1.0, 2.0, 3.0])
    tunable.change = torch.full((2,), 0.25)
    assert guard.better(after) == (sum(after) < 6)
    tunable.change = torch.full((2,), 0.5)
    assert not guard.better([5.0, 5.0, 5.0])
    found = guard.best()
    assert {name: value.tolist() for name, value in found.items()} == (
        {"w": [1.25, 1.25]} if won else {}
    )


# -- refusals -------------------------------------------------------------------------------------


def refused(model: Any, recipe: Any, match: str, data: Any = None, **options: Any) -> None:
    data = [{"input_ids": row} for row in rows()] if data is None else data
    with pytest.raises((PlanError, DataError), match=match):
        oneshot(model, recipe, data, **options)


def test_refusals_say_why_and_what_to_do(model: Path, tmp_path: Path) -> None:
    quantizing = QuantizationModifier(ignore=["lm_head"], **W3)
    recipe, out = [quantizing, TuningModifier()], {"output_dir": tmp_path / "q"}
    refused(small_model("llama"), recipe, "loaded module was passed: pass its folder", **out)
    refused(model, recipe[::-1], "move it to the end of the recipe", **out)
    refused(model, recipe, 'TuningModifier runs layer by layer.*"basic"', pipeline="basic", **out)
    refused(model, recipe, "pass output_dir", save_statistics=tmp_path / "s.safetensors")
    few = [{"input_ids": row} for row in rows(8)]
    refused(model, recipe, "needs 16 samples.*there are 8", few, **out)
    with pytest.raises(DataError, match="pass dataset="):
        oneshot(model, recipe, **out)
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    cached = QuantizationModifier(ignore=["lm_head"], kv_cache_scheme=kv, **W3)
    refused(model, [cached, TuningModifier()], "remove TuningModifier, or the kv_cache", **out)
    refused(model, [TuningModifier()], "no modifier of the recipe quantizes", **out)
    assert not any(tmp_path.iterdir())
    assert load_recipe([quantizing, TuningModifier(epochs=2)]).needs_data
