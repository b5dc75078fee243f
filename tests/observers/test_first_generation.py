"""Observers that define only `calculate_qparams`, for every strategy and as part of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.demo import calibration_texts, model_folder
from steelyard.errors import NonFiniteError, OptionError, StatisticsError, StrategyError
from steelyard.observers import Observer

Parameters = tuple[torch.Tensor, torch.Tensor]


class Plain(Observer):
    """The least that the first generation asks for: no state, whatever the strategy."""

    def calculate_qparams(
        self,
        observed: torch.Tensor,
        reduce_dims: Sequence[int] | None = None,
        tensor_id: Any = None,
        global_scale: torch.Tensor | None = None,
    ) -> Parameters:
        dims = tuple(range(observed.ndim)) if reduce_dims is None else tuple(reduce_dims)
        low, high = observed.amin(dims, keepdim=True), observed.amax(dims, keepdim=True)
        return calculate_qparams(low, high, self.quantization_args, global_scale=global_scale)


class Running(Observer):
    """As the interface was described with: an `__init__` of its own, a running range, a reset."""

    def __init__(self, quantization_args: QuantizationArgs, averaging_constant: float = 1.0):
        super().__init__(quantization_args=quantization_args)
        self.min_val: dict[Any, torch.Tensor] = {}
        self.max_val: dict[Any, torch.Tensor] = {}
        self.averaging_constant = averaging_constant

    def calculate_qparams(
        self, observed: torch.Tensor, tensor_id: Any = "default", **_: Any
    ) -> Parameters:
        low, high = torch.aminmax(observed)
        low = torch.minimum(self.min_val.get(tensor_id, low), low)
        high = torch.maximum(self.max_val.get(tensor_id, high), high)
        self.min_val[tensor_id], self.max_val[tensor_id] = low, high
        return calculate_qparams(low, high, self.quantization_args)

    def reset(self) -> None:
        super().reset()
        self.min_val, self.max_val = {}, {}


@pytest.fixture
def registered() -> Iterator[None]:
    names = {"first_plain": Plain, "first_running": Running}
    for name, observer in names.items():
        Observer.register(name)(observer)
    yield
    for name in names:
        del Observer.registry._entries[name]


def args_of(strategy: str, **options: Any) -> QuantizationArgs:
    sizes: dict[str, dict[str, Any]] = {
        "group": {"group_size": 8},
        "tensor_group": {
            "group_size": 16,
            "num_bits": 4,
            "type": "float",
            "scale_dtype": torch.float8_e4m3fn,
            "zp_dtype": torch.float8_e4m3fn,
        },
        "block": {"block_structure": [4, 16], "num_bits": 8, "type": "float"},
        "token": {"dynamic": True},
    }
    return QuantizationArgs(
        **{"num_bits": 8, "strategy": strategy, **sizes.get(strategy, {}), **options}
    )


CASES = [
    ("weight", "tensor", (12, 32)),
    ("weight", "channel", (12, 32)),
    ("weight", "group", (12, 32)),
    ("weight", "tensor_group", (12, 32)),
    ("weight", "block", (12, 32)),
    ("input", "tensor", (2, 5, 32)),
    ("input", "token", (2, 5, 32)),
    ("input", "group", (2, 5, 32)),
    ("output", "tensor", (2, 5, 32)),
    ("k", "tensor", (2, 3, 5, 8)),
    ("v", "attn_head", (2, 3, 5, 8)),
]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("base_name", "strategy", "shape"), CASES)
def test_every_strategy_gives_what_min_max_gives(
    base_name: str, strategy: str, shape: tuple[int, ...], symmetric: bool
) -> None:
    if strategy in ("tensor_group", "block") and not symmetric:
        pytest.skip("floats have no zero point")
    args = args_of(strategy, symmetric=symmetric)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = Plain(base_name, args)(value).get_qparams()
    expected = Observer.load_from_registry("memoryless_minmax", base_name=base_name, args=args)
    known = expected(value).get_qparams()
    assert found["scale"].shape == known["scale"].shape
    assert_close(found["scale"], known["scale"])
    assert_close(found["zero_point"].float(), known["zero_point"].float(), rtol=0, atol=1)
    assert_close(found["global_scale"], known["global_scale"])


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_calculate_qparams_of_a_built_in_observer(strategy: str) -> None:
    args = args_of(strategy)
    value = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    observer = Observer.load_from_registry("memoryless_minmax", quantization_args=args)
    scale, zero_point = observer.calculate_qparams(value)
    assert scale.shape == zero_point.shape == (1,)
    assert_close(scale, (value.abs().max() / 127.5).reshape(1))
    scale, _ = observer.calculate_qparams(value, reduce_dims=(-1,))
    assert_close(scale, value.abs().amax(1, keepdim=True) / 127.5)
    assert not observer.has_statistics, "asking for a slice observes nothing"


def test_a_subclass_may_ask_the_observer_that_it_is_made_of() -> None:
    class Halved(Observer.get_value_from_registry("memoryless_mse")):  # type: ignore[misc]
        def calculate_qparams(self, observed: torch.Tensor, **given: Any) -> Parameters:
            scale, zero_point = super().calculate_qparams(observed, **given)
            return scale / 2, zero_point

    args = args_of("group")
    value = torch.randn(12, 32, generator=torch.Generator().manual_seed(2))
    known = Observer.load_from_registry("memoryless_mse", quantization_args=args)
    assert_close(
        Halved("weight", args)(value).get_qparams()["scale"],
        known(value).get_qparams()["scale"] / 2,
    )


def test_get_qparams_of_a_value_with_group_indices() -> None:
    args = args_of("group", symmetric=False)
    value = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    g_idx = torch.arange(32) % 4
    scale, zero_point = Plain(args).get_qparams(observed=value, g_idx=g_idx)
    for group in range(4):
        own = value[:, g_idx == group]
        expected, zero = calculate_qparams(own.amin(1), own.amax(1), args)
        assert_close(scale[:, group], expected.flatten())
        assert_close(zero_point[:, group], zero.flatten())


def test_tokens_are_counted() -> None:
    observer = Plain("input", args_of("tensor"))
    observer.record_observed_tokens(torch.zeros(2, 5, 32))
    observer(torch.ones(3, 32))
    assert observer.num_observed_tokens == 13


def test_fused_weights_are_calculated_with_the_global_scale_that_is_stored() -> None:
    args = args_of("tensor_group")
    small, large = torch.randn(4, 32), torch.randn(4, 32) * 100
    first, second = Plain("weight", args), Plain("weight", args)
    Observer.fuse([first, second])
    first(small), second(large)
    known = [Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)]
    known.append(Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args))
    Observer.fuse(known)
    known[0](small), known[1](large)
    for ours, theirs in zip((first, second), known, strict=True):
        assert_close(ours.get_qparams()["scale"], theirs.get_qparams()["scale"])
        assert_close(ours.get_qparams()["global_scale"], theirs.get_qparams()["global_scale"])


def test_own_init_and_reset(registered: None) -> None:
    args = args_of("tensor", observer_kwargs={"averaging_constant": 0.5})
    observer = Observer.load_from_registry("first_running", base_name="input", args=args)
    assert isinstance(observer, Running)
    assert (observer.base_name, observer.averaging_constant) == ("input", 0.5)
    scale, _ = observer(torch.full((1, 4, 8), 2.0))
    assert_close(scale, torch.tensor([4 / 255]))
    scale, _ = observer(torch.full((1, 4, 8), 1.0))
    assert_close(scale, torch.tensor([4 / 255]))
    observer.reset()
    assert not observer.has_statistics and observer.num_observed_tokens == 0
    scale, _ = observer(torch.full((1, 4, 8), 1.0))
    assert_close(scale, torch.tensor([2 / 255]))


def test_unknown_option_of_an_own_init(registered: None) -> None:
    args = args_of("tensor", observer_kwargs={"averaging_constnat": 0.5})
    with pytest.raises(OptionError, match=r"Running: .*did you mean 'averaging_constant'"):
        Observer.load_from_registry("first_running", base_name="input", args=args)


def test_a_run_by_name(registered: None, tmp_path: Path) -> None:
    """Static inputs of the demo model: the running range is what `static_minmax` finds."""
    scales = {}
    for observer in ("first_running", "static_minmax"):
        inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "observer": observer}
        weights = {"num_bits": 8, "strategy": "channel", "observer": "first_plain"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        oneshot(
            str(model_folder()),
            {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"all": group}}},
            calibration_texts(3),
            tmp_path / observer,
            num_calibration_samples=3,
            max_seq_length=64,
            show_progress=False,
        )
        found = load_file(tmp_path / observer / "model.safetensors")
        scales[observer] = {k: v for k, v in found.items() if k.endswith("_scale")}
    ours, known = scales["first_running"], scales["static_minmax"]
    assert any(name.endswith("input_scale") for name in ours)
    for name, scale in known.items():
        assert_close(ours[name].float(), scale.float(), rtol=2**-8, atol=0)  # one step of bf16


def test_parts_cannot_be_joined() -> None:
    first, second = (Plain("input", args_of("tensor"))(torch.ones(2, 8)) for _ in range(2))
    with pytest.raises(StatisticsError, match=r"input \(Plain\) defines only calculate_qparams"):
        first.merge(second)


def test_wrong_shapes_and_useless_scales_are_refused() -> None:
    class Wrong(Observer):
        def calculate_qparams(self, observed: torch.Tensor, **_: Any) -> Parameters:
            return torch.ones(3), torch.zeros(3)

    class Zero(Observer):
        def calculate_qparams(self, observed: torch.Tensor, **_: Any) -> Parameters:
            return torch.zeros(1), torch.zeros(1)

    with pytest.raises(StrategyError, match=r"Wrong.*scale of shape \(3,\).*expected 12 values"):
        Wrong("weight", args_of("channel"))(torch.ones(12, 32))
    with pytest.raises(NonFiniteError, match="a scale is a divisor"):
        Zero("weight", args_of("tensor"))(torch.ones(12, 32))
    with pytest.raises(NonFiniteError, match="1 NaN of 384"):
        value = torch.ones(12, 32)
        value[3, 4] = torch.nan
        Plain("weight", args_of("tensor"))(value)
