"""Calibration on a small model: what is found, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from steelyard.errors import FusionError
from steelyard.observers import Observer
from steelyard.observers.calibration import (
    Calibration,
    calibrate_input_hook,
    freeze_module_quantization,
    initialize_observer,
    observe,
    reset_quantization_status,
    update_qparams,
    without_padding,
)

INT8 = QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False, observer="static_minmax")


def small_llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def static_w8a8(**changes: Any) -> QuantizationConfig:
    weights = QuantizationArgs(num_bits=8, strategy="channel", observer="memoryless_minmax")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=INT8)
    options = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"], **changes}
    return QuantizationConfig(**options)


def quantized(model: Any) -> dict[str, torch.nn.Module]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}


def leftovers(model: Any) -> list[str]:
    found = [n for n, m in model.named_modules() if isinstance(m, Observer)]
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        found += [f"{name}: {h}" for h in hooks if "steelyard" in getattr(h, "__module__", "")]
        found += [f"{name}.{k}" for k in module.__dict__ if k.startswith("_imatrix")]
    return found


@torch.no_grad()
def inputs_of(model: Any, batches: list[torch.Tensor], name: str) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    module = model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten()))
    for batch in batches:
        model(batch)
    handle.remove()
    return torch.cat(seen)


def test_activations_and_weights_get_the_parameters_of_what_was_seen() -> None:
    model = small_llama()
    batches = [torch.randint(0, 64, (2, 16)) for _ in range(3)]
    expected = {n: inputs_of(model, batches, n) for n in ("model.layers.0.mlp.down_proj",)}
    apply_quantization_config(model, static_w8a8())
    with Calibration(model) as calibration, torch.no_grad():
        for batch in batches:
            model(batch)
        assert calibration.unseen() == []
        calibration.finish()
    for name, seen in expected.items():
        module = model.get_submodule(name)
        scale, zero_point = calculate_qparams(seen.min()[None], seen.max()[None], INT8)
        assert_close(module.input_scale.data, scale, rtol=1e-6, atol=0)
        assert_close(module.input_zero_point.data, zero_point)
        rows = module.weight.detach().abs().amax(1, keepdim=True)
        assert_close(module.weight_scale.data, rows / 127.5, rtol=1e-6, atol=0)
    assert leftovers(model) == []
    assert {m.quantization_status for m in quantized(model).values()} == {QuantizationStatus.FROZEN}


def test_the_pass_itself_is_not_quantized() -> None:
    model = small_llama()
    batch = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        plain = model(batch).logits
        apply_quantization_config(model, static_w8a8())
        with Calibration(model) as calibration:
            assert_close(model(batch).logits, plain, rtol=0, atol=0)
            calibration.finish()
        assert not torch.equal(model(batch).logits, plain), "quantization is on again afterwards"


@pytest.mark.parametrize("moment", ["run", "finish"])
def test_an_error_leaves_the_model_as_it_was(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    apply_quantization_config(model, static_w8a8())
    before = {n: m.quantization_status for n, m in quantized(model).items()}
    if moment == "finish":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises((RuntimeError, ValueError)), Calibration(model) as calibration:
        if moment == "run":
            raise RuntimeError("out of memory")
        calibration.finish()
    assert leftovers(model) == []
    assert {n: m.quantization_status for n, m in quantized(model).items()} == before


def test_half_a_fused_layer_is_refused_and_nothing_stays() -> None:
    model = small_llama()
    apply_quantization_config(model, static_w8a8(ignore=["lm_head", "re:.*k_proj"]))
    with pytest.raises(FusionError, match="k_proj"), Calibration(model):
        pass
    assert leftovers(model) == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_reaches_no_statistic(side: str) -> None:
    module = torch.nn.Linear(8, 4)
    module.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=INT8)
    initialize_observer(module, "input")
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    mask = mask.flip(1) if side == "left" else mask
    x[mask == 0] = 1000.0
    with without_padding(mask):
        calibrate_input_hook(module, (x,))
        calibrate_input_hook(module, (x.flatten(0, 1),))
    real = x[mask.bool()]
    observer = module.input_observer
    assert_close(observer.max_vals.flatten(), real.max()[None])
    assert observer.num_observed_tokens == 14
    with without_padding(mask), pytest.raises(ValueError, match="padding"):
        calibrate_input_hook(module, (torch.randn(3, 8),))


@pytest.mark.parametrize("observer", ["imatrix_mse", "optimal"])
def test_padding_reaches_no_importance(observer: str) -> None:
    module = torch.nn.Linear(8, 4)
    weights = QuantizationArgs(num_bits=4, strategy="channel", observer=observer)
    module.quantization_scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    initialize_observer(module, "weight")
    x = torch.ones(1, 4, 8)
    x[0, 2:] = 1000.0
    with without_padding(torch.tensor([[1, 1, 0, 0]])):
        module(x)
        module(x.flatten(0, 1))
    with without_padding(torch.tensor([[0, 0, 0, 0]])):
        module(x)
    assert_close(module._imatrix_sum, torch.full((8,), 4.0))
    assert module._imatrix_count == 4


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_keys_and_values(strategy: str) -> None:
    args = QuantizationArgs(
        num_bits=8, type="float", strategy=strategy, observer="static_minmax", symmetric=True
    )
    model = small_llama()
    config = QuantizationConfig(config_groups={}, kv_cache_scheme=args)
    apply_quantization_config(model, config)
    seen: dict[str, torch.Tensor] = {}
    attention = model.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(lambda _m, _a, out: seen.update(v=out.detach()))
    with Calibration(model) as calibration, torch.no_grad():
        model(torch.randint(0, 64, (2, 16)))
        calibration.finish()
    heads = seen["v"].reshape(2, 16, 2, 16).abs()
    largest = heads.amax() if strategy == "tensor" else heads.amax((0, 1, 3))
    assert_close(attention.v_scale.data.flatten(), (largest / 448).flatten(), rtol=1e-6, atol=0)
    assert bool((attention.k_scale > 0).all())
    assert leftovers(model) == []


def test_fused_layers_share_the_global_scale() -> None:
    model = small_llama(torch.bfloat16)
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    with Calibration(model) as calibration:
        calibration.finish()
    attention = model.model.layers[0].self_attn
    scales = [getattr(attention, f"{n}_proj").weight_global_scale.data for n in "qkv"]
    assert_close(scales[0], scales[1])
    assert_close(scales[0], scales[2])


def test_unseen_modules_are_named() -> None:
    model = small_llama()
    apply_quantization_config(model, static_w8a8())
    with Calibration(model) as calibration, torch.no_grad():
        model.model.layers[0].mlp(torch.randn(1, 4, 64))
        unseen = calibration.unseen()
    assert "model.layers.1.mlp.up_proj" in unseen
    assert "model.layers.0.mlp.up_proj" not in unseen


def test_the_steps_by_hand() -> None:
    """As scripts for the interface call them, under the path that they know."""
    from steelyard.modifiers.quantization import calibration as steps

    model = small_llama()
    apply_quantization_config(model, static_w8a8())
    layer = model.model.layers[0].mlp.up_proj
    steps.initialize_observer(layer, "weight")
    steps.apply_calibration_status(layer)
    assert layer.quantization_status == QuantizationStatus.CALIBRATION
    observe([layer], "weight")
    update_qparams([layer], ["weight"])
    assert bool((layer.weight_scale > 0).all())
    freeze_module_quantization(layer)
    assert not hasattr(layer, "weight_observer")
    reset_quantization_status(model)
    assert not hasattr(layer, "quantization_status")
