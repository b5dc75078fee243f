"""Scripts of the kind that the interface was specified with, once their import root is changed."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle import initialize_module_for_quantization
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_args import QuantizationArgs
from torch.testing import assert_close

from steelyard.observers import Observer


def test_first_generation_script() -> None:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
    observer = Observer.load_from_registry("minmax", quantization_args=args)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    scale, zero_point = observer(x)
    assert scale.shape == zero_point.shape == (64, 4)
    off = (fake_quantize(x, scale, zero_point, args) - x).abs()
    largest = scale.repeat_interleave(128, 1)
    assert bool((off <= largest * 0.5001).all()), "symmetric 4 bits reach 7.5 scales, codes 7"


def test_options_of_a_recipe() -> None:
    """What a recipe writes under `weights:` reaches the observer through the args."""
    args = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=True,
        strategy="channel",
        observer="mse",
        observer_kwargs={
            "maxshrink": 0.1,
            "patience": 10,
            "averaging_constant": 0.05,
            "grid": 128.0,
            "norm": 2.0,
        },
    )
    observer = Observer.load_from_registry(args.observer, base_name="weight", args=args)
    assert (observer.maxshrink, observer.patience, observer.grid) == (0.1, 10, 128.0)
    assert (observer.norm, observer.avg_constant) == (2.0, 0.05)
    assert observer(torch.randn(8, 32)).get_qparams()["scale"].shape == (8, 1)


def test_calibration_by_hooks() -> None:
    """Observers put on a layer by name, fed by a hook, parameters stored on the layer."""
    layer = torch.nn.Linear(16, 8)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=8, strategy="channel", observer="memoryless_minmax"),
        input_activations=QuantizationArgs(num_bits=8, strategy="tensor", observer="static_minmax"),
    )
    initialize_module_for_quantization(layer, scheme)
    for base_name, args in (("input", scheme.input_activations), ("weight", scheme.weights)):
        observer = Observer.load_from_registry(args.observer, base_name=base_name, args=args)
        layer.register_module(f"{base_name}_observer", observer)
        observer.attach(layer)

    def calibrate_input(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        scale, zero_point = module.input_observer(inputs[0])
        module.input_scale.data.copy_(scale)
        module.input_zero_point.data.copy_(zero_point)

    hook = layer.register_forward_pre_hook(calibrate_input)
    batches = [torch.randn(2, 5, 16) * k for k in (1, 3, 2)]
    for batch in batches:
        layer(batch)
    hook.remove()
    for name, value in layer.weight_observer(layer.weight).get_qparams().items():
        if value is not None:
            getattr(layer, f"weight_{name}").data.copy_(value)
    for base_name in ("input", "weight"):
        getattr(layer, f"{base_name}_observer").detach(layer)
        delattr(layer, f"{base_name}_observer")

    absmax = torch.stack(batches).abs().max()
    assert_close(layer.input_scale.data, (absmax / 127.5).reshape(1))
    assert_close(layer.weight_scale.data, layer.weight.abs().amax(1, keepdim=True) / 127.5)
    assert not [name for name in layer.state_dict() if "observer" in name]
