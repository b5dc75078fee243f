"""Quantize a small model from observers alone, write it, read it back.

The model is made on the spot: a two-layer Llama with random weights. It speaks no language, so
the table shows the error of the weights and proves the checkpoint; it says nothing of quality.

    python examples/quantize_small_model.py [OUTPUT_DIR]
"""

import contextlib
import copy
import io
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from steelyard import Observer, fuse_weight_observers

SCHEMES = ["W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"]
OBSERVERS = ["memoryless_minmax", "memoryless_mse"]


def random_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def calibrate_weights(model: torch.nn.Module, scheme: str, observer: str) -> float:
    """Give every Linear but lm_head its weight parameters; return their relative error in dB."""
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    layers = [m for m in model.modules() if hasattr(m, "quantization_scheme")]
    for layer in layers:
        args = layer.quantization_scheme.weights
        layer.weight_observer = Observer.load_from_registry(observer, base_name="weight", args=args)
    fuse_weight_observers(model)
    for layer in layers:
        layer.weight_observer(layer.weight)
    signal = noise = 0.0
    for layer in layers:
        for name, value in layer.weight_observer.get_qparams().items():
            if value is not None:
                getattr(layer, f"weight_{name}").copy_(value)
    for layer in layers:
        del layer.weight_observer
        stored = forward_quantize(layer, layer.weight, "weight", layer.quantization_scheme.weights)
        signal += float(layer.weight.float().square().sum())
        noise += float((stored.float() - layer.weight.float()).square().sum())
    return 10 * torch.log10(torch.tensor(signal / noise)).item()


@torch.no_grad()
def write_and_read_back(model: LlamaForCausalLM, folder: Path) -> tuple[int, float]:
    """Return the checkpoint's size and how far its logits are from the calibrated model's."""
    tokens = torch.arange(64).reshape(2, 32)
    expected = model(tokens).logits
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return size, float((loaded(tokens).logits - expected).abs().max())


def main(output: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = random_llama()
    plain = sum(p.numel() * p.element_size() for p in source.parameters())
    print(f"A random two-layer Llama, {plain:,} bytes in bf16. Not a language model.\n")
    print(f"{'scheme':<12} {'observer':<18} {'signal/noise':>12} {'bytes':>10}  logits read back")
    for scheme in SCHEMES:
        for observer in OBSERVERS:
            model = copy.deepcopy(source)
            # compressed-tensors draws bars on stderr that twelve small models do not need
            with contextlib.redirect_stderr(io.StringIO()):
                ratio = calibrate_weights(model, scheme, observer)
                size, off = write_and_read_back(model, output / scheme / observer)
            same = "equal" if off == 0 else f"differ by {off:.2g}"
            print(f"{scheme:<12} {observer:<18} {ratio:>9.2f} dB {size:>10,}  {same}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
