"""The observer: two generations of one interface, what it refuses, and what it leaves alone."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.testing import assert_close

from steelyard.errors import (
    ImportanceWarning,
    NonFiniteError,
    NoStatisticsError,
    OptionError,
    StrategyError,
    UnknownNameError,
)
from steelyard.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    Observer,
    StaticMinMaxObserver,
)

CLASSES = {
    "memoryless_minmax": MemorylessMinMaxObserver,
    "static_minmax": StaticMinMaxObserver,
    "minmax": MinMaxObserver,
    "memoryless_mse": MemorylessMSEObserver,
    "mse": MovingAverageMSEObserver,
    "imatrix_mse": IMatrixMSEObserver,
}
WITH_MEMORY = ["static_minmax", "minmax", "mse"]
WITHOUT_MEMORY = ["memoryless_minmax", "memoryless_mse"]

INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
INT4_GROUP = QuantizationArgs(num_bits=4, strategy="group", group_size=4)

everyone = pytest.mark.parametrize("name", list(CLASSES))
# a weight observed without importance is searched uniformly, which is not the subject here
uniform = pytest.mark.filterwarnings(f"ignore::{ImportanceWarning.__module__}.ImportanceWarning")


@pytest.fixture
def registry() -> Iterator[None]:
    """Take back what a test registers."""
    entries = dict(Observer.registry._entries)
    yield
    Observer.registry._entries.clear()
    Observer.registry._entries.update(entries)


# -- construction -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda: MinMaxObserver("input", INT8),
        lambda: MinMaxObserver("input", args=INT8),
        lambda: MinMaxObserver(base_name="input", args=INT8),
        lambda: MinMaxObserver("input", quantization_args=INT8),
        lambda: Observer.load_from_registry("minmax", base_name="input", args=INT8),
        lambda: Observer.load_from_registry("minmax", base_name="input", quantization_args=INT8),
    ],
)
def test_second_generation_names_what_it_observes(build: Callable[[], Observer]) -> None:
    observer = build()
    assert type(observer) is MinMaxObserver
    assert (observer.base_name, observer.args) == ("input", INT8)


@pytest.mark.parametrize(
    "build",
    [
        lambda: MinMaxObserver(INT8),
        lambda: MinMaxObserver(args=INT8),
        lambda: MinMaxObserver(quantization_args=INT8),
        lambda: Observer.load_from_registry("minmax", args=INT8),
        lambda: Observer.load_from_registry("minmax", quantization_args=INT8),
    ],
)
def test_first_generation_observes_a_weight(build: Callable[[], Observer]) -> None:
    observer = build()
    assert type(observer) is MinMaxObserver
    assert (observer.base_name, observer.args) == ("weight", INT8)


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((), {}),
        (("weight",), {}),
        (("weight", INT8), {"quantization_args": INT8}),
        ((INT8,), {"quantization_args": INT8}),
        ((INT8,), {"args": INT8}),
        ((INT8, 0.5), {}),
    ],
)
def test_quantization_args_are_given_exactly_once(
    positional: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match="takes its QuantizationArgs once"):
        MinMaxObserver(*positional, **keywords)


@pytest.mark.parametrize(("name", "cls"), CLASSES.items())
def test_every_observer_of_the_interface_is_registered(name: str, cls: type[Observer]) -> None:
    assert name in Observer.registered_names()
    assert Observer.get_value_from_registry(name) is cls
    assert type(Observer.load_from_registry(name.replace("_", "-").upper(), args=INT8)) is cls


def test_base_class_says_what_a_subclass_must_write() -> None:
    with pytest.raises(NotImplementedError, match="update_statistics_from_observed"):
        Observer("weight", INT8)(torch.ones(2, 2))


# -- both ways of asking ------------------------------------------------------------------------


@everyone
@uniform
def test_calling_returns_the_observer_and_unpacks_to_its_parameters(name: str) -> None:
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    x = torch.randn(6, 8)
    assert observer(x) is observer
    scale, zero_point = observer
    qparams = observer.get_qparams()
    assert set(qparams) == {"scale", "zero_point", "global_scale"}
    assert qparams["global_scale"] is None
    assert scale.shape == zero_point.shape == (6, 2)
    assert_close((scale, zero_point), (qparams["scale"], qparams["zero_point"]), rtol=0, atol=0)


def test_first_generation_script_runs() -> None:
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
    observer = Observer.load_from_registry("minmax", quantization_args=args)
    x = torch.randn(64, 512)
    scale, zero_point = observer(x)
    # int4 holds -8..7, so one step is the largest magnitude over 7.5
    expected = x.reshape(64, 4, 128).abs().amax(-1) / 7.5
    assert_close(scale, expected)
    assert_close(zero_point, torch.zeros(64, 4, dtype=torch.int8))


@everyone
@uniform
def test_asking_for_parameters_changes_nothing(name: str) -> None:
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    observer(torch.randn(6, 8))
    before = {key: value.clone() for key, value in observer.get_statistics().items()}
    first, second = observer.get_qparams(), observer.get_qparams()
    assert_close(first, second, rtol=0, atol=0)
    assert_close(observer.get_statistics(), before, rtol=0, atol=0)
    assert observer.num_updates == 1


# -- registering an observer of one's own -------------------------------------------------------

USER_MODULE = '''
import torch
from steelyard.observers import Observer


@Observer.register("half_range")
class HalfRange(Observer):
    """Grows with what it sees, then gives part of it up."""

    def update_statistics_from_observed(self, observed):
        part = self.args.observer_kwargs.get("part", 0.5)
        low = observed.amin(dim=(0, -1)) * part
        high = observed.amax(dim=(0, -1)) * part
        if hasattr(self, "min_vals"):
            low = torch.minimum(low, self.min_vals)
            high = torch.maximum(high, self.max_vals)
        self.min_vals, self.max_vals = low, high
'''


@pytest.fixture
def user_module(registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("observers_of_a_user.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "observers_of_a_user", raising=False)
    importlib.import_module("observers_of_a_user")


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("from_args", "from_constructor", "part"),
    [({}, {}, 0.5), ({"part": 0.25}, {}, 0.25), ({"part": 0.25}, {"part": 0.75}, 0.75)],
)
def test_user_observer_works_by_name(
    from_args: dict[str, float], from_constructor: dict[str, float], part: float
) -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", observer_kwargs=from_args)
    observer = Observer.load_from_registry(
        "half_range", base_name="input", args=args, **from_constructor
    )
    observer(torch.tensor([[1.0, -2.0]]))(torch.tensor([[8.0, 0.0], [0.0, -1.0]]))
    assert_close(observer.min_vals, torch.tensor([-2.0 * part]))
    assert_close(observer.max_vals, torch.tensor([8.0 * part]))
    assert_close(observer.get_qparams()["scale"], torch.tensor([8.0 * part / 127.5]))
    assert observer.num_observed_tokens == 3


@pytest.mark.usefixtures("user_module")
def test_user_observer_forgets_on_reset() -> None:
    observer = Observer.load_from_registry("half_range", base_name="input", args=INT8)
    observer(torch.tensor([[-8.0, 8.0]])).reset()
    assert not observer.has_statistics
    observer(torch.tensor([[-1.0, 1.0]]))
    assert_close(observer.max_vals, torch.tensor([0.5]))


@pytest.mark.usefixtures("user_module")
def test_user_observer_is_found_beside_the_others() -> None:
    assert "half_range" in Observer.registered_names()
    with pytest.raises(UnknownNameError, match="did you mean 'half_range'"):
        Observer.load_from_registry("half-rnge", args=INT8)


@pytest.mark.usefixtures("registry")
def test_statistics_declared_only_for_merging_are_forgotten_too() -> None:
    @Observer.register("counting")
    class Counting(MemorylessMinMaxObserver):
        _act_sync_dict = {"seen": torch.distributed.ReduceOp.SUM}  # noqa: RUF012

        def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
            super().update_statistics_from_observed(observed)
            self.seen = getattr(self, "seen", torch.zeros(1)) + observed.numel()

    observer = Counting("input", INT8)(torch.ones(2, 3))
    assert_close(observer.get_statistics()["seen"], torch.tensor([6.0]))
    observer.reset()
    assert observer.get_statistics() == {}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("memoryles_mse", "did you mean 'memoryless_mse'?"),
        ("MinMaxx", "did you mean 'minmax'?"),
        ("zzz", "known: entropy, histogram, histogram_mse, "),
    ],
)
def test_unknown_name_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Observer.load_from_registry(name, args=INT8)
    assert repr(name) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.usefixtures("registry")
def test_registering_again_replaces_a_class_only_by_itself() -> None:
    def define(register_as: str) -> type[Observer]:
        @Observer.register(register_as)
        class Mine(MemorylessMinMaxObserver):
            pass

        return Mine

    first, second = define("mine"), define("mine")
    assert first is not second
    assert Observer.get_value_from_registry("mine") is second
    with pytest.raises(ValueError, match=r"'minmax' is already registered by .*MinMaxObserver"):
        define("minmax")
    assert Observer.get_value_from_registry("minmax") is MinMaxObserver


# -- options ------------------------------------------------------------------------------------


@everyone
@uniform
def test_args_of_the_caller_are_never_modified(name: str) -> None:
    options = {"norm": 2.0} if "mse" in name else {}
    args = QuantizationArgs(
        num_bits=4, strategy="group", group_size=4, observer=name, observer_kwargs=options
    )
    before = copy.deepcopy(args)
    constructor = {"grid": 40.0} if "mse" in name else {}
    observer = Observer.load_from_registry(name, base_name="weight", args=args, **constructor)
    observer(torch.randn(3, 8)).get_qparams()
    observer.reset()
    assert args == before
    assert args.observer_kwargs == options
    assert observer.args.observer_kwargs == {**options, **constructor}


def test_two_observers_of_one_args_do_not_share_options() -> None:
    args = QuantizationArgs(num_bits=8)
    first = MinMaxObserver("input", args, averaging_constant=0.5)
    assert MinMaxObserver("input", args).avg_constant == 0.01
    assert first.avg_constant == 0.5


def test_constructor_wins_over_args() -> None:
    args = QuantizationArgs(num_bits=8, observer_kwargs={"maxshrink": 0.1, "grid": 50.0})
    observer = MovingAverageMSEObserver("input", args, maxshrink=0.3)
    assert (observer.maxshrink, observer.grid) == (0.3, 50.0)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("mse", {"maxshrnk": 0.1}, "unknown option 'maxshrnk': did you mean 'maxshrink'?"),
        ("minmax", {"avg_constant": 1.0}, "unknown option 'avg_constant': did you mean 'averaging"),
        ("memoryless_mse", {"averaging_constant": 0.1}, "unknown option 'averaging_constant'"),
        ("memoryless_minmax", {"norm": 2.0}, "unknown option 'norm': known: none"),
        ("minmax", {"averaging_constant": 0.0}, "averaging_constant must be greater than 0, got 0"),
        ("minmax", {"averaging_constant": 1.1}, "averaging_constant must be less than or equal"),
        ("minmax", {"averaging_constant": float("nan")}, "averaging_constant must be"),
        ("mse", {"averaging_constant": "0.1"}, "averaging_constant must be a valid number"),
        ("mse", {"maxshrink": -0.1}, "maxshrink must be greater than or equal to 0"),
        ("mse", {"maxshrink": 1.5}, "maxshrink must be less than or equal to 1"),
        ("mse", {"patience": -1}, "patience must be greater than or equal to 0, got -1"),
        ("mse", {"patience": 2.5}, "patience must be a valid integer, got 2.5"),
        ("mse", {"grid": 0}, "grid must be greater than 0, got 0"),
        ("mse", {"grid": float("inf")}, "grid must be a finite number"),
        ("mse", {"norm": 0.0}, "norm must be greater than 0"),
        ("mse", {"norm": float("nan")}, "norm must be"),
        ("mse", {"maxshrink": 0.0}, "maxshrink=0.0 with grid=100.0 leaves no candidate"),
        ("mse", {"maxshrink": 0.2, "grid": 4.0}, "maxshrink=0.2 with grid=4.0 leaves no candidate"),
    ],
)
@pytest.mark.parametrize("where", ["args", "constructor"])
def test_bad_option_is_refused(name: str, option: dict[str, Any], message: str, where: str) -> None:
    args = QuantizationArgs(num_bits=8, observer_kwargs=option if where == "args" else {})
    constructor = option if where == "constructor" else {}
    with pytest.raises(OptionError) as caught:
        Observer.load_from_registry(name, base_name="input", args=args, **constructor)
    assert message in str(caught.value)
    assert CLASSES[name].__name__ in str(caught.value)


def test_all_bad_options_are_named_at_once() -> None:
    with pytest.raises(OptionError, match=r"(?s)patience must.*norm must.*'gird'"):
        MemorylessMSEObserver("weight", INT8, patience=-1, norm=-2.0, gird=3)


# -- what a format cannot hold ------------------------------------------------------------------

NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}
MXFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": torch.uint8,
    "zp_dtype": torch.uint8,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_bits": 1}, "integers must have 2 to 8 bits, got 1"),
        ({"num_bits": 9}, "integers must have 2 to 8 bits, got 9"),
        ({**NVFP4, "num_bits": 5}, "floats must have 4 or 8 bits, got 5"),
        ({**NVFP4, "symmetric": False}, "4-bit float has no zero point here: set symmetric=True"),
        ({**MXFP4, "symmetric": False}, "4-bit float has no zero point here: set symmetric=True"),
        ({**MXFP4, "num_bits": 8, "symmetric": False}, "8-bit float has no zero point here"),
        ({**MXFP4, "group_size": 16}, "uint8 means power-of-two scales, which belong to floats"),
        (
            {**MXFP4, "num_bits": 8, "group_size": 64},
            "uint8 means power-of-two scales, which belong to floats",
        ),
        (
            {**MXFP4, "strategy": "tensor_group"},
            "uint8 means power-of-two scales, which belong to floats",
        ),
        (
            {**MXFP4, "type": "int", "zp_dtype": torch.int8},
            "uint8 means power-of-two scales, which belong to floats",
        ),
    ],
)
def test_args_that_no_format_holds_are_refused_before_observing(
    fields: dict[str, Any], message: str
) -> None:
    args = QuantizationArgs(**fields)
    with pytest.raises(StrategyError, match=re.escape(message)):
        MemorylessMinMaxObserver("weight", args)


@pytest.mark.parametrize(
    "fields", [{"num_bits": 2}, {"num_bits": 8}, {"num_bits": 8, "type": "float"}, NVFP4, MXFP4]
)
def test_args_at_the_edge_are_accepted(fields: dict[str, Any]) -> None:
    scale, _ = MemorylessMinMaxObserver("weight", QuantizationArgs(**fields))(torch.randn(2, 32))
    assert_close(torch.isfinite(scale) & (scale > 0), torch.ones_like(scale, dtype=torch.bool))


# -- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base_name", "strategy", "shape", "tokens"),
    [
        ("input", "tensor", (3, 5, 8), 15),
        ("input", "tensor", (7, 8), 7),
        ("input", "tensor", (8,), 1),
        ("input", "token", (3, 5, 8), 15),
        ("input", "group", (3, 5, 8), 15),
        ("input", "tensor_group", (3, 5, 8), 15),
        ("output", "tensor", (3, 5, 1), 15),
        ("q", "tensor", (2, 4, 5, 8), 10),
        ("k", "attn_head", (2, 4, 5, 8), 10),
        ("v", "attn_head", (1, 2, 6, 4), 6),
        ("weight", "tensor", (6, 8), 0),
        ("weight", "group", (6, 8), 0),
    ],
)
def test_tokens_are_counted(
    base_name: str, strategy: str, shape: tuple[int, ...], tokens: int
) -> None:
    fields = {"token": {"dynamic": True}, "group": {"group_size": 4}}
    fields["tensor_group"] = fields["group"]
    args = QuantizationArgs(strategy=strategy, **fields.get(strategy, {}))
    observer = StaticMinMaxObserver(base_name, args)
    assert observer.num_observed_tokens == 0
    observer(torch.randn(shape))
    assert observer.num_observed_tokens == tokens
    observer(torch.randn(shape))
    observer(torch.empty(0, *shape[1:]))
    assert (observer.num_observed_tokens, observer.num_updates) == (2 * tokens, 2)
    observer.reset()
    assert (observer.num_observed_tokens, observer.num_updates) == (0, 0)


# -- what cannot be observed --------------------------------------------------------------------


@pytest.mark.parametrize("base_name", ["weight", "input"])
@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ([1.0, float("nan"), float("nan")], "2 NaN of 3 values"),
        ([float("inf"), 0.0, 0.0], "1 infinite of 3 values"),
        ([float("-inf"), float("nan"), float("inf")], "1 NaN and 2 infinite of 3 values"),
    ],
)
def test_non_finite_value_is_named_and_changes_nothing(
    base_name: str, values: list[float], kinds: str
) -> None:
    observer = StaticMinMaxObserver(base_name, INT8)(torch.ones(1, 3))
    observer.module_name = "layers.3.mlp.down_proj"
    before = copy.deepcopy(observer.get_statistics())
    with pytest.raises(NonFiniteError) as caught:
        observer(torch.tensor([values]))
    assert kinds in str(caught.value)
    assert f"{base_name} of layers.3.mlp.down_proj (StaticMinMaxObserver)" in str(caught.value)
    assert_close(observer.get_statistics(), before, rtol=0, atol=0)
    assert observer.num_updates == 1


def test_non_finite_count_is_of_the_value_not_of_its_padding() -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[4, 4])
    with pytest.raises(NonFiniteError, match="25 NaN of 25 values"):
        MemorylessMinMaxObserver("weight", args)(torch.full((5, 5), float("nan")))


def test_label_names_the_module_where_it_is_known() -> None:
    observer = MinMaxObserver("input", INT8)
    assert observer.label == "input (MinMaxObserver)"
    observer.module_name = "lm_head"
    assert observer.label == "input of lm_head (MinMaxObserver)"
    with pytest.raises(NoStatisticsError, match=r"No statistics available for input of lm_head"):
        observer.get_qparams()


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64],
)
def test_unsupported_type_is_refused(dtype: torch.dtype) -> None:
    observer = MemorylessMinMaxObserver("weight", INT8)
    with pytest.raises(StrategyError, match=rf"cannot observe {re.escape(str(dtype))}; dequant"):
        observer(torch.zeros(2, 2, dtype=dtype))
    assert not observer.has_statistics


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_observed_as_their_values(dtype: torch.dtype) -> None:
    value = torch.tensor([[1, 100], [3, 7]], dtype=dtype)
    found = MemorylessMinMaxObserver("weight", INT8)(value).get_qparams()
    expected = MemorylessMinMaxObserver("weight", INT8)(value.double()).get_qparams()
    assert_close(found["scale"].double(), expected["scale"])


def test_large_integers_keep_their_values() -> None:
    value = torch.tensor([[2**24 + 1, 0]], dtype=torch.int64)  # which fp32 does not hold
    found = MemorylessMinMaxObserver("weight", INT8)(value)
    assert found.max_vals.item() == 2**24 + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scale_is_stored_in_the_type_of_the_value(dtype: torch.dtype) -> None:
    observer = MemorylessMinMaxObserver("weight", INT8)(torch.tensor([[-255.0, 1.0]], dtype=dtype))
    assert_close(observer.get_qparams()["scale"], torch.tensor([2.0], dtype=dtype))


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_observer_with_memory_refuses_another_shape(name: str) -> None:
    args = QuantizationArgs(num_bits=8, strategy="group", group_size=4)
    observer = Observer.load_from_registry(name, base_name="input", args=args)
    observer(torch.randn(3, 8))
    observer(torch.randn(2, 5, 8))  # more tokens of the same width are the same thing
    with pytest.raises(StrategyError, match=r"shape \(2,\), but this value needs \(3,\)"):
        observer(torch.randn(3, 12))
    assert observer.num_updates == 2
    observer.reset()
    assert observer(torch.randn(3, 12)).get_qparams()["scale"].shape == (3,)


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_observer_without_memory_takes_any_shape(name: str) -> None:
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    for rows, columns in [(3, 8), (2, 12)]:
        scale, _ = observer(torch.randn(rows, columns))
        assert scale.shape == (rows, columns // 4)


# -- statistics ---------------------------------------------------------------------------------


@everyone
@uniform
def test_statistics_exist_from_the_first_observation_to_reset(name: str) -> None:
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    fresh = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    for _ in range(2):
        assert not observer.has_statistics
        assert observer.get_statistics() == {}
        with pytest.raises(AssertionError, match="No statistics available"):
            observer.get_qparams()
        observer(torch.empty(0, 8))
        assert not observer.has_statistics
        observer(torch.randn(2, 8))
        assert observer.has_statistics
        assert {"min_vals", "max_vals"} <= set(observer.get_statistics())
        assert set(observer.get_statistics()) <= set(observer.statistic_names())
        observer.reset()
    x = torch.randn(2, 8)
    assert_close(observer(x).get_qparams(), fresh(x).get_qparams(), rtol=0, atol=0)


@everyone
@uniform
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copy_is_equal_and_goes_its_own_way(
    name: str, duplicate: Callable[[Observer], Observer]
) -> None:
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    observer(torch.randn(2, 8))
    twin = duplicate(observer)
    assert twin.args == observer.args
    assert twin.options == observer.options
    assert_close(twin.get_statistics(), observer.get_statistics(), rtol=0, atol=0)
    assert_close(twin.get_qparams(), observer.get_qparams(), rtol=0, atol=0)
    before = copy.deepcopy(observer.get_statistics())
    twin(torch.randn(2, 8) * 100)
    twin.reset()
    assert_close(observer.get_statistics(), before, rtol=0, atol=0)
    assert observer.num_updates == 1


@everyone
@uniform
def test_observer_adds_nothing_to_a_checkpoint(name: str) -> None:
    module = torch.nn.Linear(8, 2)
    parameters = set(module.state_dict())
    module.weight_observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    module.weight_observer(module.weight)
    assert set(module.state_dict()) == parameters
    assert len(list(module.parameters())) == 2
    module.to(torch.bfloat16)  # moves the module, never the statistics of what was observed
    assert module.weight_observer.min_vals.dtype == torch.float32


@pytest.mark.parametrize("name", [*WITH_MEMORY, *WITHOUT_MEMORY])
def test_attaching_leaves_a_module_as_it_was(name: str) -> None:
    module = torch.nn.Linear(8, 2)
    before = set(module.__dict__)
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    observer.attach(module)
    module(torch.randn(2, 8))
    observer.detach(module)
    assert set(module.__dict__) == before
    assert len(module._forward_pre_hooks) == 0


def test_observing_needs_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 8))
    scale, _ = MovingAverageMSEObserver("weight", INT4_GROUP)(weight)
    assert not scale.requires_grad
    assert not any(v.requires_grad for v in MinMaxObserver(INT8)(weight).get_statistics().values())


def test_single_number_is_refused() -> None:
    with pytest.raises(StrategyError, match="single number"):
        StaticMinMaxObserver("input", INT8)(torch.tensor(1.0))


def test_integer_scales_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"torch\.int8"):
        StaticMinMaxObserver("input", QuantizationArgs(num_bits=8, scale_dtype=torch.int8))
