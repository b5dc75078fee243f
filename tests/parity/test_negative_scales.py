"""A checkpoint with negative scales, read by transformers.

benchmarks/negative_scales.py does the same with real models, and with vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from steelyard import Observer

GROUP = 32


def small_llama() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def write(model: torch.nn.Module, bits: int, folder: Path) -> None:
    args = QuantizationArgs(num_bits=bits, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            observer = Observer.load_from_registry(
                "optimal", base_name="weight", args=args, negative_scales=True
            )
            scale, zero_point = observer(layer.weight)
            layer.weight_scale.copy_(scale)
            layer.weight_zero_point.copy_(zero_point)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of packed words, (out, in), which are stored plus half of their range."""
    stream = ((words.unsqueeze(-1) >> torch.arange(32)) & 1).flatten(1)
    whole = stream[:, : stream.shape[1] // bits * bits].unflatten(1, (-1, bits))
    return (whole << torch.arange(bits)).sum(-1) - 2 ** (bits - 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_transformers_multiplies_by_the_sign(bits: int, tmp_path: Path) -> None:
    write(small_llama(), bits, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded(torch.arange(8).unsqueeze(0))  # the first pass unpacks the weights
    layers = [name.removesuffix(".weight_packed") for name in stored if "packed" in name]
    assert len(layers) == 7
    negative = 0
    for layer in layers:
        scale = stored[f"{layer}.weight_scale"].float()
        codes = codes_of(stored[f"{layer}.weight_packed"].long(), bits)
        expected = codes * scale.repeat_interleave(GROUP, dim=1)
        weight = loaded.get_submodule(layer).weight.data
        torch.testing.assert_close(weight, expected.to(torch.bfloat16), rtol=0, atol=0)
        negative += int((scale < 0).sum())
    assert negative > 100, "no negative scales, so nothing was tested"
