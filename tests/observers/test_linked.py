"""Fused layers: which are linked, what they then share, and which groups no server can load."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from nvfp4 import nvfp4
from torch import nn
from torch.testing import assert_close

from steelyard.errors import FusionError, NoStatisticsError
from steelyard.fusion import FUSED_LAYER_NAMES
from steelyard.observers import (
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MovingAverageMSEObserver,
    Observer,
    fuse_weight_observers,
)

NVFP4 = nvfp4()
FP8 = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
FP8_CHANNEL = QuantizationArgs(num_bits=8, type="float", strategy="channel")
INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
INT4_GROUP = QuantizationArgs(num_bits=4, strategy="group", group_size=16)

GROUPS = [
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
]
groups = pytest.mark.parametrize("names", GROUPS, ids="+".join)


def layer(args: QuantizationArgs | None, size: float = 1.0, name: str = "memoryless_minmax") -> Any:
    """Return a Linear whose weights are of the given size, with a weight observer."""
    linear = nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(16, 32) * size)
    if args is not None:
        linear.weight_observer = Observer.load_from_registry(name, base_name="weight", args=args)
    return linear


def block(**layers: Any) -> nn.Module:
    module = nn.Module()
    for name, value in layers.items():
        setattr(module, name, value)
    return module


def observe(module: nn.Module) -> dict[str, Any]:
    """Observe every weight in a model, then ask for all parameters."""
    owners = {n: m for n, m in module.named_modules() if hasattr(m, "weight_observer")}
    for owner in owners.values():
        owner.weight_observer(owner.weight)
    return {name: owner.weight_observer.get_qparams() for name, owner in owners.items()}


def partners(module: nn.Module, name: str) -> set[Observer]:
    return module.get_submodule(name).weight_observer._fused_observers


# -- which are linked ---------------------------------------------------------------------------


def test_groups_are_those_that_servers_fuse() -> None:
    assert set(GROUPS) <= set(FUSED_LAYER_NAMES)


@groups
def test_siblings_are_linked_with_each_other_and_nothing_else(names: tuple[str, ...]) -> None:
    model = block(
        first=block(**{name: layer(NVFP4) for name in names}, o_proj=layer(NVFP4)),
        second=block(**{name: layer(NVFP4) for name in names}),
    )
    fuse_weight_observers(model)
    for parent in ("first", "second"):
        for name in names:
            linked = {model.get_submodule(f"{parent}.{n}").weight_observer for n in names}
            own = model.get_submodule(f"{parent}.{name}").weight_observer
            assert partners(model, f"{parent}.{name}") == linked - {own}
            assert own.module_name == f"{parent}.{name}"
    assert partners(model, "first.o_proj") == set()


@groups
@pytest.mark.parametrize("absent", ["None", "no attribute", "not a module"])
def test_projection_that_is_not_there_is_passed_over(names: tuple[str, ...], absent: str) -> None:
    module = block(**{name: layer(NVFP4) for name in names[1:]})
    if absent == "None":
        module.register_module(names[0], None)
    elif absent == "not a module":
        setattr(module, names[0], "tied elsewhere")
    fuse_weight_observers(module)
    linked = {module.get_submodule(name).weight_observer for name in names[1:]}
    for name in names[1:]:
        own = module.get_submodule(name).weight_observer
        assert partners(module, name) == linked - {own}
    assert len(observe(module)) == len(names) - 1


def test_unquantized_groups_and_fused_twice_are_no_trouble() -> None:
    module = block(
        attn=block(q_proj=layer(None), k_proj=layer(None), v_proj=layer(None)),
        mlp=block(gate_proj=layer(NVFP4), up_proj=layer(NVFP4)),
    )
    fuse_weight_observers(module)
    fuse_weight_observers(module)
    assert len(partners(module, "mlp.gate_proj")) == 1
    Observer.fuse([])
    Observer.fuse(iter([module.mlp.up_proj.weight_observer]))


def test_name_that_the_user_gave_is_kept() -> None:
    module = block(w1=layer(NVFP4), w3=layer(NVFP4))
    module.w1.weight_observer.module_name = "model.layers.7.experts.3.w1"
    fuse_weight_observers(module)
    assert module.w1.weight_observer.module_name == "model.layers.7.experts.3.w1"
    assert module.w3.weight_observer.module_name == "w3"


# -- groups that no server can load -------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"num_bits": 8}, "num_bits 4 and 8"),
        ({"symmetric": False}, "symmetric True and False"),
        ({"group_size": 32}, "group_size 16 and 32"),
        ({"strategy": "channel", "group_size": None}, "strategy group and channel; group_size 16"),
        ({"num_bits": 8, "type": "float"}, "num_bits 4 and 8; type"),
        ({"scale_dtype": torch.float16}, "scale_dtype None and torch.float16"),
    ],
)
def test_disagreement_names_the_layers_and_the_fields(other: dict[str, Any], fields: str) -> None:
    differing = QuantizationArgs(**{**INT4_GROUP.model_dump(), "zp_dtype": None, **other})
    module = block(
        attn=block(q_proj=layer(INT4_GROUP), k_proj=layer(INT4_GROUP), v_proj=layer(differing))
    )
    with pytest.raises(FusionError) as caught:
        fuse_weight_observers(module)
    message = str(caught.value)
    assert "attn.q_proj" in message
    assert "attn.v_proj" in message
    assert "attn.k_proj" not in message
    assert fields in message
    for name in ("q_proj", "k_proj", "v_proj"):
        assert partners(module, f"attn.{name}") == set(), "a refused group stays unlinked"


def test_how_a_scale_is_found_may_differ() -> None:
    module = block(
        gate_proj=layer(NVFP4, name="memoryless_minmax"), up_proj=layer(NVFP4, name="mse")
    )
    fuse_weight_observers(module)
    qparams = observe(module)
    gate, up = qparams["gate_proj"], qparams["up_proj"]
    assert_close(gate["global_scale"], up["global_scale"], rtol=0, atol=0)


@groups
def test_partly_quantized_group_names_both_parts(names: tuple[str, ...]) -> None:
    layers = {name: layer(NVFP4) for name in names[:-1]} | {names[-1]: layer(None)}
    with pytest.raises(FusionError) as caught:
        fuse_weight_observers(block(attn=block(**layers)))
    quantized, left_out = str(caught.value).split(" will be quantized but ")
    assert quantized == ", ".join(f"attn.{name}" for name in names[:-1])
    assert left_out.startswith(f"attn.{names[-1]} will not")


# -- NVFP4: one global scale --------------------------------------------------------------------


@groups
@pytest.mark.parametrize("observer", ["memoryless_minmax", "memoryless_mse", "mse"])
def test_global_scale_is_of_the_largest_weight_of_the_group(
    names: tuple[str, ...], observer: str
) -> None:
    module = block(
        **{name: layer(NVFP4, 3.0**i, observer) for i, name in enumerate(names)},
        o_proj=layer(NVFP4, 100.0, observer),
    )
    fuse_weight_observers(module)
    qparams = observe(module)
    largest = max(module.get_submodule(name).weight.abs().max() for name in names)
    # E4M3 reaches 448 and E2M1 reaches 6
    expected = (448 * 6 / largest).reshape(1)
    for name in names:
        assert_close(qparams[name]["global_scale"], expected)
    shared = [qparams[name]["global_scale"] for name in names]
    for one, another in combinations(shared, 2):
        assert_close(one, another, rtol=0, atol=0)
    alone = 448 * 6 / module.o_proj.weight.abs().max().reshape(1)
    assert_close(qparams["o_proj"]["global_scale"], alone)


def test_local_scales_belong_to_the_shared_global_scale() -> None:
    module = block(w1=layer(NVFP4, 0.2), w3=layer(NVFP4, 2.0))
    fuse_weight_observers(module)
    qparams = observe(module)["w1"]
    absmax = module.w1.weight.detach().reshape(16, 2, 16).abs().amax(-1)
    ideal = absmax / 6 * qparams["global_scale"]
    assert_close(qparams["scale"], ideal.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)


def test_asking_before_all_have_observed_names_the_missing_one() -> None:
    module = block(mlp=block(gate_proj=layer(NVFP4), up_proj=layer(NVFP4)))
    fuse_weight_observers(module)
    gate, up = module.mlp.gate_proj, module.mlp.up_proj
    gate.weight_observer(gate.weight)
    with pytest.raises(NoStatisticsError) as caught:
        gate.weight_observer.get_qparams()
    message = str(caught.value)
    assert "No statistics available for weight of mlp.up_proj" in message
    assert "fused with weight of mlp.gate_proj" in message
    up.weight_observer(up.weight)
    assert gate.weight_observer.get_qparams()["global_scale"].shape == (1,)


@pytest.mark.parametrize("args", [INT4_GROUP, INT8, FP8_CHANNEL], ids=["int4", "int8", "fp8"])
def test_layers_that_share_nothing_do_not_wait_for_each_other(args: QuantizationArgs) -> None:
    module = block(gate_proj=layer(args), up_proj=layer(args))
    alone = MemorylessMinMaxObserver("weight", args)(module.gate_proj.weight).get_qparams()
    fuse_weight_observers(module)
    observer = module.gate_proj.weight_observer(module.gate_proj.weight)
    assert_close(observer.get_qparams(), alone, rtol=0, atol=0)


# -- FP8: one scale per fused tensor ------------------------------------------------------------


@groups
@pytest.mark.parametrize("cls", [MemorylessMinMaxObserver, MemorylessMSEObserver])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_tensor_scale_is_the_largest_of_those_found_apart(
    names: tuple[str, ...], cls: type[Observer], dtype: torch.dtype
) -> None:
    module = block(**{name: layer(None, 3.0**-i) for i, name in enumerate(names)}).to(dtype)
    apart = []
    for name in names:
        linear = module.get_submodule(name)
        apart.append(cls("weight", FP8)(linear.weight).get_qparams()["scale"])
        linear.weight_observer = cls("weight", FP8)
    fuse_weight_observers(module)
    for qparams in observe(module).values():
        assert_close(qparams["scale"], torch.stack(apart).amax(0), rtol=0, atol=0)
        assert qparams["global_scale"] is None
    assert len({scale.item() for scale in apart}) == len(names)


def test_fp8_average_is_shared_too() -> None:
    module = block(w1=layer(FP8, 1.0, "mse"), w3=layer(FP8, 4.0, "mse"))
    fuse_weight_observers(module)
    qparams = observe(module)
    alone = MovingAverageMSEObserver("weight", FP8)(module.w3.weight).get_qparams()
    assert_close(qparams["w1"], alone, rtol=0, atol=0)
    assert_close(qparams["w3"], alone, rtol=0, atol=0)


@pytest.mark.parametrize("args", [INT8, FP8_CHANNEL, INT4_GROUP], ids=["int8", "channel", "group"])
def test_other_scales_are_not_shared(args: QuantizationArgs) -> None:
    module = block(q_proj=layer(args, 1.0), k_proj=layer(args, 3.0), v_proj=layer(args, 9.0))
    fuse_weight_observers(module)
    for name, qparams in observe(module).items():
        weight = module.get_submodule(name).weight
        alone = MemorylessMinMaxObserver("weight", args)(weight).get_qparams()
        assert_close(qparams, alone, rtol=0, atol=0)


def test_fp8_inputs_are_never_shared() -> None:
    observers = [MemorylessMinMaxObserver("input", FP8)(torch.full((1, 4), s)) for s in (1.0, 2.0)]
    Observer.fuse(observers)
    scales = [observer.get_qparams()["scale"] for observer in observers]
    assert_close(scales[1], scales[0] * 2)


# -- a real model -------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [NVFP4, FP8], ids=["nvfp4", "fp8"])
def test_llama(args: QuantizationArgs) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    linears.pop("lm_head")
    assert len(linears) == 2 * 7
    for linear in linears.values():
        linear.weight_observer = MemorylessMinMaxObserver("weight", args)
    fuse_weight_observers(model)
    qparams = observe(model)
    key = "global_scale" if args is NVFP4 else "scale"
    for index in range(2):
        prefix = f"model.layers.{index}"
        for names in (
            [f"{prefix}.self_attn.{p}_proj" for p in "qkv"],
            [f"{prefix}.mlp.{p}_proj" for p in ("gate", "up")],
            [f"{prefix}.self_attn.o_proj"],
            [f"{prefix}.mlp.down_proj"],
        ):
            largest = max(linears[name].weight.abs().max() for name in names).reshape(1)
            expected = 448 * 6 / largest if args is NVFP4 else largest / 448
            for name in names:
                assert_close(qparams[name][key], expected, msg=name)
    # no two groups of random weights have the same scale: 4 groups in each of 2 layers
    assert len({q[key].item() for q in qparams.values()}) == 8
