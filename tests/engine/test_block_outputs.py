"""Output errors right after a run with data, against the decoded checkpoint in transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_model
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from steelyard import oneshot
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.engine.block_outputs import TOKENS
from steelyard.modifiers import (
    GPTQModifier,
    IMatrixGatherer,
    Modifier,
    QuantizationModifier,
    SmoothQuantModifier,
)

W4A16: dict[str, Any] = {"scheme": "W4A16", "group_size": 16, "ignore": ["lm_head"]}
ORDER: dict[str, Any] = {"shuffle_calibration_samples": False}
INT8 = {"num_bits": 8, "strategy": "tensor"}
STATIC = {"targets": ["Linear"], "weights": {**INT8, "strategy": "channel"}}


def rows(count: int = 6, length: int = 24) -> list[list[int]]:
    chance = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (length,), generator=chance).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama", torch.float32, num_hidden_layers=2).save_pretrained(folder)
    return folder


def measured(
    source: Path, folder: Path, count: int = 1, ids: list[list[int]] | None = None
) -> tuple[dict[str, float], list[float]]:
    """Return output errors of modules and blocks on the first rows, inputs as in the original."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    written = WrittenCheckpoint(folder, None)
    modules = {name: model.get_submodule(name) for name in written.schemes}
    seen: dict[str, torch.Tensor] = {}
    calls: list[tuple[Any, Any, torch.Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args, n=name: seen.update({n: args[0]}))
        for name, module in modules.items()
    ]
    for layer in model.model.layers:
        hook = lambda _, args, kwargs, out: calls.append((args, kwargs, out))  # noqa: E731
        handles.append(layer.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model(torch.tensor(rows()[:count] if ids is None else ids), use_cache=False)
        for handle in handles:
            handle.remove()
        outputs, blocks = {}, []
        for name, module in modules.items():
            stored = torch.cat([part for _, part in written.decode(name)]).float()
            wanted = seen[name] @ module.weight.T
            off = (seen[name] @ stored.T - wanted).square().sum()
            outputs[name] = float(off / wanted.square().sum())
            module.weight.data = stored
        for layer, (args, kwargs, out) in zip(model.model.layers, calls, strict=True):
            off = (layer(*args, **kwargs) - out).square().sum()
            blocks.append(float(off / (out - args[0]).square().sum()))
    return outputs, blocks


@pytest.mark.parametrize("batch_size", [1, 2])
def test_weights_rounded_to_nearest(source: Path, tmp_path: Path, batch_size: int) -> None:
    """The error is that of the first batch."""
    steps = [IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(**W4A16)]
    result = oneshot(source, steps, rows(), tmp_path / "q", batch_size=batch_size, **ORDER)
    details = {name: each.details for name, each in result.modules.items()}
    assert len(details) == 14
    outputs, blocks = measured(source, tmp_path / "q", batch_size)
    for name, error in outputs.items():
        assert details[name]["output_error"] == pytest.approx(error, rel=1e-3)
        assert details[name]["block_error"] == pytest.approx(
            blocks[int(name.split(".")[2])], rel=1e-3
        )
    lines = str(result).split("\n")
    assert "output SNR, dB" in lines[0]
    worst = max(range(2), key=lambda i: blocks[i])
    decibel = -10 * math.log10(blocks[worst])
    said = f"block with the largest output error: model.layers.{worst}, {decibel:.1f} dB"
    assert said in lines
    report = json.loads((tmp_path / "q" / "report.json").read_text())
    assert [each["name"] for each in report["blocks"]] == ["model.layers.0", "model.layers.1"]
    assert [each["error"] for each in report["blocks"]] == pytest.approx(blocks, rel=1e-3)
    assert report["summary"]["outputs_on"] == "calibration"
    assert "block_error" not in report["modules"][0]["details"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_of_long_samples_the_first_tokens_count(
    source: Path, tmp_path: Path, batch_size: int
) -> None:
    data = rows(6, 2 * TOKENS + 30)
    steps = [IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(**W4A16)]
    result = oneshot(source, steps, data, tmp_path / "q", batch_size=batch_size, **ORDER)
    first = [row[: TOKENS // batch_size] for row in data[:batch_size]]
    outputs, blocks = measured(source, tmp_path / "q", ids=first)
    for name, error in outputs.items():
        details = result.modules[name].details
        assert details["output_error"] == pytest.approx(error, rel=1e-3)
        assert details["block_error"] == pytest.approx(blocks[int(name.split(".")[2])], rel=1e-3)


def test_a_layer_that_needs_all_tokens_gets_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, plain = rows(6, 2 * TOKENS), LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != 2 * TOKENS:
            raise KeyError(x.shape)
        return plain(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    step = QuantizationModifier(scheme="FP8", ignore=["lm_head"])
    result = oneshot(source, step, data, tmp_path / "q", **ORDER)
    known = [each.details for each in result.modules.values()]
    assert all("output_error" in each and "block_error" in each for each in known)


def test_padding_counts_nowhere(source: Path, tmp_path: Path) -> None:
    """Samples that are padded at the left begin with padding; all of their tokens pass."""
    length = 2 * TOKENS
    padded = [
        {"input_ids": [0] * 100 + row, "attention_mask": [0] * 100 + [1] * (length - 100)}
        for row in rows(3, length - 100)
    ]
    steps = [IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(**W4A16)]
    result = oneshot(source, steps, padded, tmp_path / "q", batch_size=1, **ORDER)
    for each in result.modules.values():
        assert 0 < each.details["output_error"] < 0.05
        assert 0 < each.details["block_error"] < 0.05


def test_gptq_states_that_of_all_batches_and_the_block_has_its_own(
    source: Path, tmp_path: Path
) -> None:
    steps = GPTQModifier(**W4A16, drift_correction=False)
    result = oneshot(source, steps, rows(), tmp_path / "q", **ORDER)
    _, blocks = measured(source, tmp_path / "q")
    outputs, _ = measured(source, tmp_path / "q", len(rows()))
    first = {n: each.details for n, each in result.modules.items() if ".layers.0." in n}
    for name, details in first.items():  # later layers have inputs of the quantized ones before
        assert details["block_error"] == pytest.approx(blocks[0], rel=1e-3)
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            assert details["output_error"] == pytest.approx(outputs[name], rel=1e-3)


@pytest.mark.parametrize(
    "steps",
    [
        [QuantizationModifier(scheme="FP8", ignore=["lm_head"])],
        [
            QuantizationModifier(
                config_groups={"group_0": {**STATIC, "input_activations": INT8}},
                ignore=["lm_head"],
            )
        ],
        [SmoothQuantModifier(), QuantizationModifier(scheme="FP8", ignore=["lm_head"])],
    ],
)
def test_rounded_inputs_count(source: Path, tmp_path: Path, steps: list[Modifier]) -> None:
    """The error of the weight alone is less than that of the output, whose input is rounded too."""
    result = oneshot(source, steps, rows(), tmp_path / "q", **ORDER)
    for each in result.modules.values():
        assert 0 < each.details["output_error"] < 0.05
        assert 0 < each.details["block_error"] < 0.05
    if len(steps) == 1:
        outputs, _ = measured(source, tmp_path / "q")  # of rounded weights alone
        more = [result.modules[name].details["output_error"] > e for name, e in outputs.items()]
        assert sum(more) >= 12


def test_one_answer_whatever_the_threads(source: Path, tmp_path: Path) -> None:
    steps = [IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(**W4A16)]
    found = []
    kept = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            result = oneshot(source, steps, rows(), tmp_path / str(threads))
            found.append({n: m.details["output_error"] for n, m in result.modules.items()})
    finally:
        torch.set_num_threads(kept)
    assert found[0] == found[1]


def test_experts_that_the_first_batch_misses_have_none(tmp_path: Path) -> None:
    small_model("qwen3_moe", torch.float32, num_hidden_layers=2).save_pretrained(tmp_path / "m")
    steps = [IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(**W4A16)]
    data = [rows()[0][:1], *rows()]
    result = oneshot(tmp_path / "m", steps, data, tmp_path / "q", **ORDER)
    known = {n for n, m in result.modules.items() if "output_error" in m.details}
    assert any("experts" in name for name in known) and len(known) < len(result.modules)
    assert all("block_error" in each.details for each in result.modules.values())
