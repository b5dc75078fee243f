"""Whole runs on an accelerator write the CPU's bytes, and bring each weight there once per pass."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import toy_runs
from toy_process import on_toy

import steelyard

RUNS = [
    ("llama", "dynamic"),
    ("llama", "gptq"),
    ("llama", "importance"),
    ("llama", "cache"),
    ("qwen3_moe", "static"),
    ("qwen3_moe", "dynamic"),
    ("qwen3_moe", "gptq"),
    ("qwen3_moe", "importance"),
]


@pytest.mark.parametrize(("family", "recipe"), RUNS, ids=lambda value: value)
def test_a_run_writes_the_bytes_of_the_cpu(tmp_path: Path, family: str, recipe: str) -> None:
    on_toy(tmp_path, toy_runs.same_bytes, tmp_path, family, recipe)


@pytest.mark.parametrize("recipe", ["static", "gptq"])
def test_hidden_states_have_the_same_bits_in_each_place(tmp_path: Path, recipe: str) -> None:
    """GPTQ keeps those of the unquantized model beside them."""
    disk, device, host, files = on_toy(tmp_path, toy_runs.same_in_each_place, tmp_path, recipe)
    assert disk[1].endswith("in files of TMPDIR") and files[1].endswith("in files of TMPDIR")
    assert device[1].endswith("on toy:0") and host[1].endswith("in host memory")
    assert device[0] < host[0] == files[0]  # hidden states that left the device


def test_a_resumed_run_may_keep_hidden_states_elsewhere(tmp_path: Path) -> None:
    on_toy(tmp_path, toy_runs.resumed, tmp_path)


@pytest.mark.parametrize(("family", "recipe"), RUNS, ids=lambda value: value)
def test_a_run_holds_no_more_than_its_plan_says(tmp_path: Path, family: str, recipe: str) -> None:
    held, said = on_toy(tmp_path, toy_runs.held_and_said, tmp_path, family, recipe)
    assert held <= said <= 4 * held


def test_each_weight_goes_to_the_device_once_and_ahead(tmp_path: Path) -> None:
    """The model has four shapes of weights in two layers, and an embedding; its head is not run."""
    transfers = on_toy(tmp_path, toy_runs.same_bytes, tmp_path, "llama", "static")
    brought = Counter(each.shape for each in transfers if each.to_device and len(each.shape) == 2)
    weights = {(32, 32): 2 * 2, (16, 32): 2 * 2, (64, 32): 2 * 2, (32, 64): 2, (128, 32): 1}
    assert {shape: brought[shape] for shape in weights} == weights
    ahead = [each for each in transfers if each.stream == "side"]
    assert len(ahead) == 9  # the parameters of the second layer
    assert all(each.pinned and each.to_device for each in ahead)


@pytest.mark.parametrize("recipe", ["static", "gptq"])
def test_each_weight_of_experts_goes_to_the_device_once(tmp_path: Path, recipe: str) -> None:
    """Two layers have four experts of three weights each, and k and v in the same shape."""
    transfers = on_toy(tmp_path, toy_runs.same_bytes, tmp_path, "qwen3_moe", recipe)
    brought = Counter(each.shape for each in transfers if each.to_device and len(each.shape) == 2)
    weights = {(32, 32): 2 * (4 * 3 + 2), (64, 32): 2, (32, 64): 2, (128, 32): 1}
    assert {shape: brought[shape] for shape in weights} == weights


def test_a_layer_that_does_not_fit_twice_is_read_ahead_to_the_host(tmp_path: Path) -> None:
    transfers = on_toy(tmp_path, toy_runs.without_room, tmp_path)
    assert all(each.stream == "main" for each in transfers)


@pytest.mark.parametrize(("family", "recipe"), [("llama", "static"), ("qwen3_moe", "dynamic")])
def test_an_evaluation_has_the_figures_of_the_cpu(tmp_path: Path, family: str, recipe: str) -> None:
    """It holds no more than it announced, and halves a batch that does not fit."""
    cpu, toy, less = on_toy(tmp_path, toy_runs.evaluations, tmp_path, family, recipe)
    assert cpu == toy
    notes = less.pop("notes")
    assert {**less, "notes": notes[: len(cpu["notes"])]} == cpu
    assert any("ran out of memory" in note and "the run went on with" in note for note in notes)


def test_a_comparison_has_the_errors_of_the_cpu(tmp_path: Path) -> None:
    cpu, toy = on_toy(tmp_path, toy_runs.comparisons, tmp_path)
    assert cpu == toy


@pytest.mark.parametrize(
    ("family", "recipe", "length"),
    [("llama", "static", 96), ("llama", "gptq", 512), ("qwen3_moe", "importance", 96)],
)
def test_a_batch_that_does_not_fit_is_halved(
    tmp_path: Path, family: str, recipe: str, length: int
) -> None:
    """The run goes on, and writes the bytes of one whose batches fit."""
    notes = on_toy(tmp_path, toy_runs.short_of_memory, tmp_path, family, recipe, length)
    words = f"model.layers.0: the device ran out of memory with 8 samples of {length} tokens"
    assert notes[0].startswith(words), notes
    assert notes[0].endswith("the run went on with 4: batch_size=4 avoids it")


def test_a_sample_that_does_not_fit(tmp_path: Path) -> None:
    error = on_toy(tmp_path, toy_runs.without_memory, tmp_path)
    assert "out of memory on the device with 1 sample of 96 tokens at a time" in error
    assert "use max_seq_length=48, or device='cpu'" in error


@pytest.mark.parametrize("faster", [True, False])
def test_a_stream_goes_through_the_device_where_that_is_faster(
    tmp_path: Path, faster: bool
) -> None:
    notes, used = on_toy(tmp_path, toy_runs.stream, tmp_path, faster)
    where = "go through toy:0" if faster else "are quantized on the CPU"
    assert f"weights {where}: {1 if faster else 3} ns per weight there with its transfer, 4" in (
        " ".join(notes)
    )
    assert used == faster


def test_both_ways_of_a_stream_are_measured(tmp_path: Path) -> None:
    here, there, transfers = on_toy(tmp_path, toy_runs.measured_rates, tmp_path)
    assert here > 0 and there > 0 and transfers


def test_choices_of_a_device(tmp_path: Path) -> None:
    on_toy(tmp_path, toy_runs.choices, tmp_path)


def test_only_placement_and_ranks_name_a_kind_of_device() -> None:
    source = Path(steelyard.__file__).parent
    named = re.compile(r"""\.cuda\b|["'](cuda|xpu|hip|mps|npu)\b|["']\w+:\d["']""")
    found = [
        f"{path.relative_to(source)}:{number}: {line.strip()}"
        for path in sorted(source.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line) and not _may_name(path.relative_to(source))
    ]
    assert not found, "\n".join(found)


def _may_name(path: Path) -> bool:
    return path == Path("model/placement.py") or path.parts[0] == "distributed"
