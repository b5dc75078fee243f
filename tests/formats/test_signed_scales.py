"""Which schemes get negative scales: those that recipes set, and what the search makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file

from steelyard import oneshot
from steelyard.demo import model_folder
from steelyard.formats.signed_scales import reads_signed_scales


def scheme(bits: int, inputs: bool = False, **kind: bool | str) -> QuantizationScheme:
    weights = QuantizationArgs(num_bits=bits, strategy="group", group_size=32, **kind)
    activations = QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if inputs else None
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


@pytest.mark.parametrize("bits", range(2, 9))
def test_symmetric_integers_below_eight_bits(bits: int) -> None:
    assert reads_signed_scales(scheme(bits)) == (bits < 8)
    assert not reads_signed_scales(scheme(bits, inputs=True))
    assert not reads_signed_scales(scheme(bits, symmetric=False))


def test_floats_never() -> None:
    assert not reads_signed_scales(scheme(4, type="float"))


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("refused", [False, True])
def test_recipes_let_scales_be_negative(bits: int, refused: bool, tmp_path: Path) -> None:
    options = {"observer": "optimal"} | (
        {"observer_kwargs": {"negative_scales": False}} if refused else {}
    )
    weights = {"num_bits": bits, "strategy": "group", "group_size": 32, **options}
    group = {"targets": ["Linear"], "weights": weights}
    modifier = {"config_groups": {"all": group}, "ignore": ["lm_head"]}
    recipe = {"QuantizationModifier": modifier}
    oneshot(str(model_folder()), recipe, output_dir=tmp_path / "out", show_progress=False)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = torch.cat([t.flatten() for n, t in stored.items() if n.endswith("weight_scale")])
    assert bool((scales < 0).any()) == (bits == 3 and not refused)
