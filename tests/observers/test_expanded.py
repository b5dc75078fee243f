"""Ranges above the observed one: tried, never worse, and better where FP4 has its gap."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from steelyard.errors import OptionError
from steelyard.observers import Observer

NVFP4 = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights


def error(name: str, weight: torch.Tensor, **options: object) -> float:
    observer = Observer.load_from_registry(name, base_name="weight", args=NVFP4, **options)
    q = observer(weight).get_qparams()
    stored = fake_quantize(
        weight, q["scale"], q["zero_point"], observer.args, global_scale=q["global_scale"]
    )
    return float((stored - weight).abs().pow(2.4).sum(dtype=torch.float64))


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_without(seed: int) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))
    plain = error("memoryless_mse", weight, maxshrink=0.2, grid=100, patience=0)
    assert error("nvfp4_expanded_mse", weight) < plain
    assert error("nvfp4_expanded_mse", weight) < 0.93 * error("memoryless_minmax", weight)


def test_a_group_that_wants_a_larger_range() -> None:
    """5 and 4.9 lie in the gap if 6 is stored as 6, and at 4 if it is stored as 4."""
    weight = torch.full((1, 32), 0.75)
    weight[0, 16:] = torch.tensor([4.0, 3.0] * 8)  # as 6 and 4.5, or as 4 and 3
    weight[0, 0] = 12.0  # sets the global scale
    observer = Observer.load_from_registry("nvfp4_expanded_mse", base_name="weight", args=NVFP4)
    shrinking = Observer.load_from_registry("memoryless_mse", base_name="weight", args=NVFP4)
    grown = observer(weight).get_qparams()["scale"][0, 1]
    plain = shrinking(weight).get_qparams()["scale"][0, 1]
    assert float(grown / plain) == pytest.approx(1.5, rel=0.1)


def test_the_observed_range_is_always_tried() -> None:
    observer = Observer.load_from_registry("nvfp4_expanded_mse", base_name="weight", args=NVFP4)
    factors = list(observer.factors())
    assert 1.0 in factors
    assert max(factors) == 1.8
    assert min(factors) == pytest.approx(0.8, abs=0.01)
    assert len(factors) == 113  # llm-compressor's 112, and the observed range


def test_expand_is_an_option_of_every_search() -> None:
    args = QuantizationArgs(num_bits=4, strategy="channel")
    observer = Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)
    assert observer.expand == 1.0 and max(observer.factors()) == 1.0
    with pytest.raises(OptionError, match="expand"):
        Observer.load_from_registry("memoryless_mse", base_name="weight", args=args, expand=0.5)
