"""A quantized checkpoint reads as the plain one that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from torch.testing import assert_close

from steelyard.checkpoint import Shards
from steelyard.checkpoint.decoded import DecodedView
from steelyard.errors import CheckpointError
from steelyard.formats import format_of

SCHEMES = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_BLOCK", "NVFP4", "MXFP4"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_those_of_the_compressor(scheme: str, small_model: Callable[..., Any]) -> None:
    model = small_model(scheme, torch.float32)
    view = DecodedView(model.write())
    kept = [name for name in view.names() if ".input_" not in name]
    assert set(kept) == set(model.source.names())
    compressor = BaseCompressor.get_value_from_registry(format_of(model.scheme))
    stored = Shards(model.folder)
    for module in model.modules:
        start = f"{module}."
        state = {n.removeprefix(start): stored.read(n) for n in stored if n.startswith(start)}
        expected = compressor.decompress(state, model.scheme)["weight"].float()
        name = f"{module}.weight"
        assert view.info(name).shape == model.source.info(name).shape
        assert view.info(name).dtype == torch.float32
        assert_close(view.read(name), expected, rtol=0, atol=0)
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.0.q_proj.bias"):
        assert_close(view.read(name), model.source.read(name), rtol=0, atol=0)
    assert set(view.schemes) == set(model.modules)


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_packed"])
def test_shape_that_does_not_fit_is_refused(leaf: str, small_model: Callable[..., Any]) -> None:
    model = small_model("W4A16")
    name = f"{model.modules[0]}.{leaf}"
    cut = model.stored[name][:, :1].contiguous()
    folder = model.write({**model.stored, name: cut})
    with pytest.raises(CheckpointError, match=rf"{name} is \(48, 1\), but its scheme"):
        DecodedView(folder)
