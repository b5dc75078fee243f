"""Layer by layer, decoded from the files, equals transformers with both models in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_equal, oracle, quantize, samples, static, weights
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from families import FAMILIES, small_model

from steelyard.evaluate import divergence as compare
from steelyard.evaluate import evaluate
from steelyard.evaluate.evaluation_memory import LogitSizes
from steelyard.model import activations, skeleton
from steelyard.model.layerwise import LayerwiseModel
from steelyard.model.unstacking import unstack

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "observer": "static_minmax"}
MIXED = {
    "group_0": {**weights(num_bits=4, strategy="group", group_size=64), "targets": ["re:.*mlp.*"]},
    "group_1": {**static(), "targets": ["re:.*self_attn.*"]},
}
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name} for name in PRESET_SCHEMES if name not in ("UNQUANTIZED", "INT8")},
    "W4A16 group 64 asymmetric": {
        "config_groups": {
            "group_0": weights(num_bits=4, strategy="group", group_size=64, symmetric=False)
        }
    },
    "W4A16 channel": {"config_groups": {"group_0": weights(num_bits=4, strategy="channel")}},
    "W8A8 static": {"config_groups": {"group_0": static()}},
    "W8A8 static asymmetric": {"config_groups": {"group_0": static(symmetric=False)}},
    "FP8 KV cache": {"scheme": "FP8_DYNAMIC", "kv_cache_scheme": KV},
    "KV cache alone": {"kv_cache_scheme": KV},
    "mixed": {"config_groups": MIXED},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama", **SIZES).save_pretrained(folder, max_shard_size="400KB")
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_equal_transformers(scheme: str, source: Path, tmp_path: Path) -> None:
    quantized = quantize(source, tmp_path / "q", **SCHEMES[scheme])
    found = evaluate(source, quantized, samples(), batch_size=2)
    assert found.kl_divergence > 0
    assert_equal(found, oracle(source, quantized, samples()))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt2"])
def test_families_equal_transformers(family: str, tmp_path: Path) -> None:
    # transformers decodes experts in the type of their scales, which is that of the model
    dtype = torch.float32 if family == "qwen3_moe" else torch.bfloat16
    small_model(family, dtype).save_pretrained(tmp_path / "m")
    groups = {"group_0": weights(num_bits=4, strategy="group", group_size=32)}
    quantized = quantize(tmp_path / "m", tmp_path / "q", config_groups=groups)
    found = evaluate(tmp_path / "m", quantized, samples())
    assert_equal(found, oracle(tmp_path / "m", quantized, samples()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_equals_itself(family: str, tmp_path: Path) -> None:
    small_model(family).save_pretrained(tmp_path / "m")
    found = evaluate(tmp_path / "m", tmp_path / "m", samples())
    assert (found.kl_divergence, found.kl_max, found.top1_agreement) == (0, 0, 1)
    assert found.perplexity == found.base_perplexity
    assert_equal(found, oracle(tmp_path / "m", tmp_path / "m", samples()))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_that_are_not_quantized_are_compared_as_they_are(
    family: str, tmp_path: Path
) -> None:
    model = small_model(family)
    model.save_pretrained(tmp_path / "m")
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    model.save_pretrained(tmp_path / "other")
    found = evaluate(tmp_path / "m", tmp_path / "other", samples())
    assert found.kl_divergence > 0
    assert_equal(found, oracle(tmp_path / "m", tmp_path / "other", samples()))


def test_quantized_base(source: Path, tmp_path: Path) -> None:
    first = quantize(source, tmp_path / "a", scheme="FP8_DYNAMIC")
    second = quantize(source, tmp_path / "b", scheme="W4A16")
    assert_equal(evaluate(first, second, samples()), oracle(first, second, samples()))


def quantize_inputs_of_experts(model: Any) -> None:
    """Quantize each token of an expert to FP8, as a server does."""

    def to_fp8(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        scale = args[0].abs().amax(-1, keepdim=True) / 448
        return (args[0] / scale).to(torch.float8_e4m3fn).float() * scale

    model._weight_conversions = None  # of packed weights, which cannot be undone
    for stack in unstack(model):
        for module in stack.experts.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(to_fp8)


def test_inputs_of_experts_are_quantized_as_a_server_does(tmp_path: Path) -> None:
    small_model("qwen3_moe", torch.float32).save_pretrained(tmp_path / "m")
    quantized = quantize(tmp_path / "m", tmp_path / "q", scheme="FP8_DYNAMIC")
    found = evaluate(tmp_path / "m", quantized, samples())
    plain = oracle(tmp_path / "m", quantized, samples())
    assert abs(found.kl_divergence / plain["kl_divergence"] - 1) > 0.01
    expected = oracle(tmp_path / "m", quantized, samples(), quantize_inputs_of_experts)
    assert_equal(found, expected, rel=1e-3)


def test_inputs_of_joined_experts_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a form that is not known as one of Linear layers."""
    monkeypatch.setattr(skeleton, "unstack", lambda model: [])
    small_model("qwen3_moe", torch.float32).save_pretrained(tmp_path / "m")
    quantized = quantize(tmp_path / "m", tmp_path / "q", scheme="FP8_DYNAMIC")
    found = evaluate(tmp_path / "m", quantized, samples())
    assert_equal(found, oracle(tmp_path / "m", quantized, samples()))
    matrices = 3 * 4 * 3  # of each of the layers' experts
    assert f"the inputs of {matrices} matrices" in found.notes[-1]


def test_cutting_up_the_work_changes_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = quantize(source, tmp_path / "q", scheme="W4A16")
    expected = oracle(source, quantized, samples())
    monkeypatch.setattr(compare, "LogitSizes", partial(LogitSizes, 5 * 128, 3 * 128))
    for batch_size in (1, 2, 8):
        assert_equal(evaluate(source, quantized, samples(), batch_size=batch_size), expected)


def test_hidden_states_beyond_the_limit_go_to_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = quantize(source, tmp_path / "q", scheme="W4A16")
    (tmp_path / "spilled").mkdir()
    monkeypatch.setattr(activations.tempfile, "tempdir", str(tmp_path / "spilled"))
    sizes: list[int] = []
    run = LayerwiseModel.run

    def watched(self: LayerwiseModel, *args: Any) -> Any:
        ends = run(self, *args)
        sizes.append(
            sum(f.stat().st_size for f in (tmp_path / "spilled").rglob("*") if f.is_file())
        )
        return ends

    monkeypatch.setattr(LayerwiseModel, "run", watched)
    tokens = sum(map(len, samples()))
    both = 2 * tokens * 256 * 4
    in_memory = evaluate(source, quantized, samples(), memory=both)
    assert sizes == [0, 0]
    in_files = evaluate(source, quantized, samples(), memory=both - 1)
    assert sizes[2:] == [both // 2, both]
    assert list((tmp_path / "spilled").iterdir()) == []
    numbers = [{**e.as_dict(), "seconds": 0} for e in (in_memory, in_files)]
    assert numbers[0] == numbers[1]


def test_one_layer_is_in_memory_at_a_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = quantize(source, tmp_path / "q", scheme="W4A16")
    held: list[set[str]] = []
    check = LayerwiseModel._check

    def watched(self: LayerwiseModel, values: torch.Tensor, what: str, verb: str = "is") -> None:
        names = self.source.model.named_parameters()
        real = [name for name, p in names if p.device.type != "meta"]
        held.append({".".join(name.split(".")[:3]) for name in real if ".layers." in name})
        check(self, values, what, verb)

    monkeypatch.setattr(LayerwiseModel, "_check", watched)
    evaluate(source, quantized, samples())
    assert max(map(len, held)) == 1
    assert {"model.layers.0"} in held and {"model.layers.1"} in held and set() in held


def test_samples_are_the_first_in_order(source: Path, tmp_path: Path) -> None:
    quantized = quantize(source, tmp_path / "q", scheme="W4A16")
    found = evaluate(source, quantized, samples(), num_samples=2, max_seq_length=9)
    assert (found.samples, found.tokens) == (2, 16)
    assert_equal(found, oracle(source, quantized, [ids[:9] for ids in samples()[:2]]))
    assert "2 samples with 18 tokens" in found.notes[0]
