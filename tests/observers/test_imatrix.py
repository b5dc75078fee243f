"""The weighed search: gathering E[x^2], handing it over, using it, and doing without."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.testing import assert_close

from steelyard.errors import ImportanceError, ImportanceWarning, OptionError, StatisticsError
from steelyard.kernels.grid_search import search_range, shrink_factors
from steelyard.observers import IMatrixMSEObserver, MemorylessMSEObserver, Observer
from steelyard.observers.helpers import flatten_for_calibration

COLUMNS = 32
INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}
WEIGHT_ARGS = {
    "tensor": QuantizationArgs(num_bits=4, strategy="tensor"),
    "channel": QuantizationArgs(num_bits=4, strategy="channel"),
    "group": INT4,
    "tensor_group": QuantizationArgs(strategy="tensor_group", **NVFP4),
    "block": QuantizationArgs(num_bits=4, strategy="block", block_structure=[4, 16]),
    "padded block": QuantizationArgs(num_bits=4, strategy="block", block_structure=[5, 12]),
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_importance(
    importance: torch.Tensor, args: QuantizationArgs = INT4, **options: Any
) -> IMatrixMSEObserver:
    """Return an observer that picked `importance` up from a gathering pass of 10 tokens."""
    module = torch.nn.Linear(importance.numel(), 4)
    module._imatrix_sum = importance * 10
    module._imatrix_count = torch.tensor(10)
    observer = IMatrixMSEObserver("weight", args, **options)
    observer.attach(module)
    return observer


# -- options ------------------------------------------------------------------------------------


def test_defaults_are_attributes() -> None:
    observer = IMatrixMSEObserver("weight", INT4)
    assert (observer.maxshrink, observer.patience, observer.grid) == (0.95, 5, 20)
    assert (observer.norm, observer.strict) == (3.0, False)


def test_options_are_attributes() -> None:
    given = {"maxshrink": 0.5, "patience": 0, "grid": 40, "norm": 2, "strict": True}
    observer = IMatrixMSEObserver("weight", INT4, **given)
    assert {name: getattr(observer, name) for name in given} == given


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"grid": 0}, "grid must be greater than 0"),
        ({"grid": -5}, "grid must be greater than 0"),
        ({"patience": -1}, "patience must be greater than or equal to 0"),
        ({"maxshrink": -0.01}, "maxshrink must be greater than or equal to 0"),
        ({"maxshrink": 1.01}, "maxshrink must be less than or equal to 1"),
        ({"maxshrink": 0.0}, "leaves no candidate"),
        ({"maxshrink": 0.04}, "maxshrink=0.04 with grid=20.* leaves no candidate"),
        ({"norm": 0.0}, "norm must be greater than 0"),
        ({"norm": -1.0}, "norm must be greater than 0"),
        ({"norm": float("inf")}, "norm must be a finite number"),
        ({"norm": float("nan")}, "norm must be"),
        ({"norm": "3"}, "norm must be a valid number"),
        ({"strict": "yes"}, "strict must be a valid boolean"),
        ({"strikt": True}, "did you mean 'strict'"),
        ({"averaging_constant": 0.1}, "unknown option 'averaging_constant'"),
    ],
)
def test_bad_option_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=rf"IMatrixMSEObserver: .*{message}"):
        IMatrixMSEObserver("weight", INT4, **option)
    with pytest.raises(ValueError, match=message):
        IMatrixMSEObserver("weight", INT4.model_copy(update={"observer_kwargs": option}))


# -- gathering ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_hook_gathers_the_mean_square_of_every_channel(dtype: torch.dtype, bias: bool) -> None:
    module = torch.nn.Linear(COLUMNS, 4, bias=bias, dtype=dtype)
    observer = IMatrixMSEObserver("weight", INT4)
    observer.attach(module)
    shapes = [(7, COLUMNS), (2, 5, COLUMNS), (1, 1, COLUMNS), (0, COLUMNS), (2, 2, 3, COLUMNS)]
    batches = [(seeded(*shape, seed=i) * (i + 1)).to(dtype) for i, shape in enumerate(shapes)]
    for batch in batches:
        module(batch)
    tokens = np.concatenate([b.double().numpy().reshape(-1, COLUMNS) for b in batches])
    assert len(tokens) == 7 + 10 + 1 + 0 + 12
    assert int(observer._imatrix_count) == len(tokens)
    assert observer._imatrix_sum.dtype == torch.float32
    expected = torch.from_numpy((tokens**2).mean(axis=0)).float()
    assert_close(observer._imatrix_sum / observer._imatrix_count, expected)
    # whoever reads the module reads the same
    assert_close(module._imatrix_sum, observer._imatrix_sum, rtol=0, atol=0)
    assert_close(module._imatrix_count, observer._imatrix_count, rtol=0, atol=0)


def test_squares_of_low_precision_inputs_neither_overflow_nor_vanish() -> None:
    module = torch.nn.Linear(2, 1, dtype=torch.float16)
    observer = IMatrixMSEObserver("weight", INT4)
    observer.attach(module)
    for _ in range(100):
        module(torch.tensor([[1000.0, 2.0**-20]], dtype=torch.float16))
    assert_close(observer._imatrix_sum, torch.tensor([1e8, 100 * 2.0**-40]))


def test_hook_looks_into_a_tuple_and_passes_others_over() -> None:
    class Takes(torch.nn.Module):
        in_features = 3

        def forward(self, *args: Any, **kwargs: Any) -> None:
            return None

    module = Takes()
    observer = IMatrixMSEObserver("weight", INT4)
    observer.attach(module)
    for call in [(), (None,), ("text",), ((),), ((None,),)]:
        module(*call)
    module(attention_mask=torch.ones(3))
    assert int(observer._imatrix_count) == 0
    module((torch.tensor([[1.0, 2.0, 3.0]]), "second"))
    module(torch.tensor([[1.0, 1.0, 0.0]]), torch.ones(5))
    assert_close(observer._imatrix_sum, torch.tensor([2.0, 5.0, 9.0]))
    assert int(observer._imatrix_count) == 2


def test_gathering_works_in_inference_mode_and_with_gradients() -> None:
    module = torch.nn.Linear(3, 1)
    observer = IMatrixMSEObserver("weight", INT4)
    observer.attach(module)
    with torch.inference_mode():
        module(torch.ones(2, 3))
    module(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert_close(observer._imatrix_sum, torch.full((3,), 4.0))
    assert not observer._imatrix_sum.requires_grad


def test_output_of_the_module_is_untouched() -> None:
    module, x = torch.nn.Linear(COLUMNS, 4), seeded(5, COLUMNS)
    expected, before = module(x), x.clone()
    observer = IMatrixMSEObserver("weight", INT4)
    observer.attach(module)
    assert_close(module(x), expected, rtol=0, atol=0)
    assert_close(x, before, rtol=0, atol=0)


@pytest.mark.parametrize("module", [torch.nn.Embedding(4, 8), torch.nn.Conv1d(8, 8, 1)])
def test_module_without_in_features_is_left_alone(module: torch.nn.Module) -> None:
    before = set(module.__dict__)
    observer = IMatrixMSEObserver("weight", INT4)
    observer.attach(module)
    assert set(module.__dict__) == before
    assert len(module._forward_pre_hooks) == 0
    observer.detach(module)
    assert observer.get_statistics() == {}


# -- handing over -------------------------------------------------------------------------------


def test_detach_leaves_sum_and_count_for_the_next_observer() -> None:
    module = torch.nn.Linear(COLUMNS, 4)
    untouched = set(module.__dict__)
    first = IMatrixMSEObserver("weight", INT4)
    first.attach(module)
    x = seeded(6, COLUMNS)
    module(x)
    first.detach(module)
    assert len(module._forward_pre_hooks) == 0
    assert set(module.__dict__) - untouched == {"_imatrix_sum", "_imatrix_count", "_imatrix_bins"}
    module(x)  # after detaching, nothing is gathered
    assert_close(module._imatrix_sum, x.square().sum(0))
    assert int(module._imatrix_count) == 6

    second = IMatrixMSEObserver("weight", INT4)
    second.attach(module)
    assert set(module.__dict__) == untouched
    assert len(module._forward_pre_hooks) == 0
    assert_close(second._imatrix_sum, x.square().sum(0))
    assert int(second._imatrix_count) == 6
    module(x)  # the second pass does not gather
    assert int(second._imatrix_count) == 6
    second.detach(module)
    assert set(module.__dict__) == untouched


def test_attached_module_saves_no_importance() -> None:
    module = torch.nn.Linear(COLUMNS, 4)
    IMatrixMSEObserver("weight", INT4).attach(module)
    module(seeded(3, COLUMNS))
    assert set(module.state_dict()) == {"weight", "bias"}


def test_detaching_twice_or_unattached_is_harmless() -> None:
    module, observer = torch.nn.Linear(COLUMNS, 4), IMatrixMSEObserver("weight", INT4)
    observer.detach(module)
    observer.attach(module)
    observer.detach(module)
    observer.detach(module)
    assert int(module._imatrix_count) == 0


def test_copy_of_a_model_gathers_for_itself() -> None:
    module = torch.nn.Linear(COLUMNS, 4)
    module.weight_observer = IMatrixMSEObserver("weight", INT4)
    module.weight_observer.attach(module)
    module(seeded(3, COLUMNS))
    twin = copy.deepcopy(module)
    twin(seeded(5, COLUMNS, seed=1))
    assert int(module.weight_observer._imatrix_count) == 3
    assert int(twin.weight_observer._imatrix_count) == 8
    assert int(twin._imatrix_count) == 8
    twin.weight_observer.detach(twin)
    assert (len(twin._forward_pre_hooks), len(module._forward_pre_hooks)) == (0, 1)


def test_gathering_resumed_from_a_file_reaches_the_module(tmp_path: Path) -> None:
    killed, x = torch.nn.Linear(COLUMNS, 4), seeded(6, COLUMNS)
    observer = IMatrixMSEObserver("weight", INT4)
    observer.attach(killed)
    killed(x[:4])
    observer.save_statistics(tmp_path / "s")

    module, resumed = torch.nn.Linear(COLUMNS, 4), IMatrixMSEObserver("weight", INT4)
    resumed.attach(module)
    resumed.load_statistics(tmp_path / "s")
    module(x[4:])
    resumed.detach(module)
    assert int(module._imatrix_count) == 6
    assert_close(module._imatrix_sum, x.square().sum(0))


def test_reset_while_gathering_starts_over() -> None:
    module, observer = torch.nn.Linear(COLUMNS, 4), IMatrixMSEObserver("weight", INT4)
    observer.attach(module)
    module(seeded(3, COLUMNS))
    observer.reset()
    x = seeded(5, COLUMNS, seed=1)
    module(x)
    observer.detach(module)
    assert_close(module._imatrix_sum, x.square().sum(0))
    assert int(module._imatrix_count) == 5


# -- weighing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", list(WEIGHT_ARGS))
def test_search_is_weighed_column_by_column(strategy: str) -> None:
    args = WEIGHT_ARGS[strategy]
    weight = seeded(12, COLUMNS)
    importance = seeded(COLUMNS, seed=1).square() + 0.01
    observer = with_importance(importance, args)(weight)
    assert observer.fallback_reason is None
    everywhere = importance.expand_as(weight) / importance.mean()
    low, high = search_range(
        flatten_for_calibration(weight, "weight", args),
        args,
        args.scale_dtype or weight.dtype,
        shrink_factors(0.95, 20),
        3.0,
        patience=5,
        importance=flatten_for_calibration(everywhere.contiguous(), "weight", args),
        global_scale=observer.get_global_scale(),
    )
    assert_close((observer.min_vals, observer.max_vals), (low, high), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", list(WEIGHT_ARGS))
def test_important_columns_reconstruct_better_than_unweighed(strategy: str) -> None:
    args = WEIGHT_ARGS[strategy]
    weight = seeded(60, COLUMNS) * (1 + 3 * (seeded(60, COLUMNS, seed=5) > 1.5))
    important = torch.zeros(COLUMNS, dtype=torch.bool)
    important[::8] = True
    importance = torch.where(important, 1e4, 1.0)
    weighed = with_importance(importance, args)(weight)
    options = {"maxshrink": 0.95, "grid": 20.0, "norm": 3.0}
    unweighed = MemorylessMSEObserver("weight", args, **options)(weight)
    errors = [_column_errors(weight, observer, 3.0) for observer in (weighed, unweighed)]
    assert errors[0][important].sum() < 0.9 * errors[1][important].sum()
    assert errors[0].sum() >= errors[1].sum(), "unweighed, the search has the least total error"


def _column_errors(weight: torch.Tensor, observer: Observer, norm: float) -> torch.Tensor:
    """Return sum |w - reconstructed| ** norm of each column, worked out without the package."""
    qparams, args = observer.get_qparams(), observer.args
    scale = qparams["scale"].float()
    if qparams["global_scale"] is not None:
        scale = scale / qparams["global_scale"]
    if args.strategy == "block":
        height, width = args.block_structure
        scale = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
        scale = scale[: weight.shape[0], : weight.shape[1]]
    elif scale.ndim == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(16, 1)
    scaled = weight / scale
    if args.type == "int":
        rounded = scaled.round().clamp(-8, 7)
    else:
        grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
        grid = torch.cat([-grid.flip(0), grid])
        rounded = grid[(scaled[..., None] - grid).abs().argmin(-1)]
    return (weight - rounded * scale).abs().pow(norm).sum(0)


def test_importance_follows_the_group_index() -> None:
    weight, importance = seeded(12, COLUMNS), seeded(COLUMNS, seed=1).square() + 0.01
    g_idx = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(3)) // 16
    order = torch.argsort(g_idx, stable=True)
    ordered = with_importance(importance)(weight, g_idx=g_idx)
    by_hand = with_importance(importance[order])(weight[:, order])
    left_behind = with_importance(importance)(weight[:, order])
    assert_close(ordered.get_qparams(), by_hand.get_qparams(), rtol=0, atol=0)
    assert not torch.equal(ordered.min_vals, left_behind.min_vals)
    again = with_importance(importance)(weight)
    assert_close(ordered(weight).get_qparams(), again.get_qparams(), rtol=0, atol=0)


def test_only_proportions_of_importance_matter() -> None:
    weight, importance = seeded(12, COLUMNS), seeded(COLUMNS, seed=1).square() + 0.01
    expected = with_importance(importance)(weight).get_qparams()
    for factor in (2.0**-120, 2.0**118):
        assert_close(with_importance(importance * factor)(weight).get_qparams(), expected)


def test_columns_that_carry_nothing_may_be_a_whole_group() -> None:
    importance = torch.cat([torch.zeros(16), torch.ones(16)])
    observer = with_importance(importance, strict=True)(seeded(4, COLUMNS))
    scale = observer.get_qparams()["scale"]
    assert_close(scale[:, 0], seeded(4, COLUMNS)[:, :16].abs().amax(1) / 7.5)


def test_fused_weights_keep_their_importance_in_the_second_search() -> None:
    args = WEIGHT_ARGS["tensor_group"]
    importance = seeded(COLUMNS, seed=1).square() + 0.01
    small, large = seeded(12, COLUMNS) * 0.13, seeded(12, COLUMNS, seed=2)
    observers = [with_importance(importance, args)(weight) for weight in (small, large)]
    Observer.fuse(observers)
    shared = observers[1].get_global_scale()
    low, high = search_range(
        flatten_for_calibration(small, "weight", args),
        args,
        args.scale_dtype,
        shrink_factors(0.95, 20),
        3.0,
        patience=5,
        importance=(importance / importance.mean()).reshape(1, 1, 2, 16),
        global_scale=shared,
    )
    assert_close(observers[0].chosen_range(shared), (low, high), rtol=0, atol=0)


# -- doing without ------------------------------------------------------------------------------

GOOD = torch.ones(COLUMNS)


def spoiled(index: int, value: float) -> torch.Tensor:
    importance = GOOD.clone()
    importance[index] = value
    return importance


FALLBACKS: dict[str, tuple[Callable[..., IMatrixMSEObserver], str]] = {
    "never attached": (
        lambda **o: IMatrixMSEObserver("weight", INT4, **o),
        "importance is missing",
    ),
    "NaN": (lambda **o: with_importance(spoiled(3, float("nan")), **o), "1 non-finite values"),
    "infinite": (lambda **o: with_importance(spoiled(3, float("inf")), **o), "1 non-finite values"),
    "negative": (lambda **o: with_importance(spoiled(3, -1.0), **o), "1 negative values"),
    "all zero": (lambda **o: with_importance(GOOD * 0, **o), "importance is all zero"),
    "too small": (
        lambda **o: with_importance(GOOD[1:], **o),
        "importance has size 31, but the weight has 32 columns",
    ),
    "too large": (
        lambda **o: with_importance(torch.ones(64), **o),
        "importance has size 64, but the weight has 32 columns",
    ),
    "activation": (
        lambda **o: IMatrixMSEObserver("input", INT4, **o),
        "applies to the columns of a weight, not to an activation",
    ),
}


@pytest.mark.parametrize(("build", "reason"), FALLBACKS.values(), ids=list(FALLBACKS))
def test_unusable_importance_warns_and_weighs_alike(
    build: Callable[..., IMatrixMSEObserver], reason: str
) -> None:
    weight = seeded(4, COLUMNS)
    observer = build()
    observer.module_name = "layers.2.mlp.up_proj"
    with pytest.warns(ImportanceWarning, match=reason) as caught:
        observer(weight)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert f"{observer.base_name} of layers.2.mlp.up_proj (IMatrixMSEObserver)" in message
    assert "strict=True" in message
    assert reason in str(observer.fallback_reason)
    uniform = MemorylessMSEObserver(
        observer.base_name, INT4, maxshrink=0.95, patience=5, grid=20, norm=3.0
    )
    assert_close(observer.get_qparams(), uniform(weight).get_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize(("build", "reason"), FALLBACKS.values(), ids=list(FALLBACKS))
def test_strict_makes_unusable_importance_an_error(
    build: Callable[..., IMatrixMSEObserver], reason: str
) -> None:
    observer = build(strict=True)
    observer.module_name = "layers.2.mlp.up_proj"
    with pytest.raises(ImportanceError, match=rf"layers\.2\.mlp\.up_proj .*{reason}.*strict=Fals"):
        observer(seeded(4, COLUMNS))
    assert not observer.has_statistics
    assert (observer.num_updates, observer.observed_dtype, observer.observed_shape) == (
        0,
        None,
        None,
    )


def test_attached_module_that_saw_no_tokens_lacks_importance() -> None:
    module, observer = torch.nn.Linear(COLUMNS, 4), IMatrixMSEObserver("weight", INT4, strict=True)
    observer.attach(module)
    module(torch.empty(0, COLUMNS))
    with pytest.raises(ImportanceError, match="importance is missing"):
        observer(module.weight)


@pytest.mark.parametrize("strategy", list(WEIGHT_ARGS))
def test_good_importance_passes_strictly_and_silently(strategy: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_importance(GOOD, WEIGHT_ARGS[strategy], strict=True)(seeded(12, COLUMNS))


def test_fallback_reason_is_of_the_last_observation() -> None:
    observer = IMatrixMSEObserver("weight", INT4)
    with pytest.warns(ImportanceWarning, match="missing"):
        observer(seeded(4, COLUMNS))
    observer._imatrix_sum, observer._imatrix_count = GOOD.clone(), torch.tensor(1)
    assert observer(seeded(4, COLUMNS)).fallback_reason is None


# -- merging ------------------------------------------------------------------------------------


def test_merge_adds_importance_and_drops_the_range_found_without_it() -> None:
    weight, x = seeded(4, COLUMNS), seeded(9, COLUMNS, seed=1)
    observers = [IMatrixMSEObserver("weight", INT4) for _ in range(2)]
    for observer, part in zip(observers, (x[:2], x[2:]), strict=True):
        module = torch.nn.Linear(COLUMNS, 4)
        observer.attach(module)
        module(part)
        observer(weight)
    first, second = observers
    assert first.merge(second) is first
    assert_close(first._imatrix_sum, x.square().sum(0))
    assert int(first._imatrix_count) == 9
    assert not first.has_statistics
    assert second.has_statistics
    first(weight)
    whole = with_importance(x.square().mean(0))(weight)
    assert_close(first.get_qparams(), whole.get_qparams())


def test_merge_reaches_the_module_that_is_being_gathered() -> None:
    module, first = torch.nn.Linear(COLUMNS, 4), IMatrixMSEObserver("weight", INT4)
    first.attach(module)
    first.merge(with_importance(GOOD))
    assert int(module._imatrix_count) == 10
    module(torch.ones(1, COLUMNS))
    first.detach(module)
    assert_close(module._imatrix_sum, torch.full((COLUMNS,), 11.0))


def test_merge_with_an_observer_that_gathered_nothing() -> None:
    empty, full = IMatrixMSEObserver("weight", INT4), with_importance(GOOD)
    empty.merge(full)
    full.merge(IMatrixMSEObserver("weight", INT4))
    assert_close(empty._imatrix_sum, full._imatrix_sum, rtol=0, atol=0)
    assert int(empty._imatrix_count) == int(full._imatrix_count) == 10
    empty._imatrix_sum.zero_()
    assert_close(full._imatrix_sum, GOOD * 10)


def test_merge_refuses_another_width() -> None:
    with pytest.raises(StatisticsError, match=r"_imatrix_sum has shape \(32,\) .* \(16,\)"):
        with_importance(GOOD).merge(with_importance(GOOD[:16]))


def test_sync_outside_a_process_group_keeps_the_range() -> None:
    observer = with_importance(GOOD)(seeded(4, COLUMNS))
    assert observer.sync_activation_stats() == []
    assert observer.has_statistics


def test_importance_travels_through_a_file(tmp_path: Path) -> None:
    weight, importance = seeded(4, COLUMNS), seeded(COLUMNS, seed=1).square() + 0.01
    with_importance(importance).save_statistics(tmp_path / "s")
    loaded = IMatrixMSEObserver("weight", INT4, strict=False).load_statistics(tmp_path / "s")
    expected = with_importance(importance)(weight).get_qparams()
    assert_close(loaded(weight).get_qparams(), expected, rtol=0, atol=0)


def test_reset_forgets_importance() -> None:
    observer = with_importance(GOOD, strict=True)(seeded(4, COLUMNS))
    observer.reset()
    assert observer.get_statistics() == {}
    with pytest.raises(ImportanceError, match="importance is missing"):
        observer(seeded(4, COLUMNS))


def test_attaching_in_inference_mode_gathers_outside_of_it() -> None:
    module = torch.nn.Linear(8, 4)
    observer = Observer.load_from_registry(
        "imatrix_mse", base_name="weight", args=QuantizationArgs(num_bits=4, strategy="channel")
    )
    with torch.inference_mode():
        observer.attach(module)
    module(torch.ones(3, 8))
    with torch.inference_mode():
        module(torch.ones(2, 8))
    observer.detach(module)
    assert_close(module._imatrix_sum, torch.full((8,), 5.0))
    assert int(module._imatrix_count) == 5


def test_importance_for_an_activation_is_not_implemented() -> None:
    observer = IMatrixMSEObserver("input", QuantizationArgs(num_bits=8), strict=True)
    with pytest.raises(NotImplementedError, match="applies to the columns of a weight") as raised:
        observer(torch.ones(2, 8))
    assert isinstance(raised.value, ImportanceError)


def test_optimal_weights_columns_by_a_power_of_importance() -> None:
    """The power p of E[x^2] gives what E[x^2] = sums ** p gives."""
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    squares = torch.logspace(-2, 2, 32)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
    scales = []
    for given, power in ((squares, 0.5), (squares.sqrt(), 1.0), (squares, 1.0)):
        observer = Observer.load_from_registry(
            "optimal", base_name="weight", args=args, importance_power=power
        )
        observer.add_importance(given, 1)
        scales.append(observer(weight).get_qparams()["scale"])
    assert torch.equal(scales[0], scales[1])
    assert not torch.equal(scales[0], scales[2])


@pytest.mark.parametrize(("weighed", "default", "other"), [(False, 3.0, 2.0), (True, 2.0, 3.0)])
def test_optimal_minimizes_squares_with_importance_and_cubes_without(
    weighed: bool, default: float, other: float
) -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16)
    scales = []
    for norm in (None, default, other):
        observer = Observer.load_from_registry("optimal", base_name="weight", args=args, norm=norm)
        if weighed:
            observer.add_importance(torch.logspace(-2, 2, 32), 1)
        scales.append(observer(weight).get_qparams()["scale"])
    assert torch.equal(scales[0], scales[1])
    assert not torch.equal(scales[0], scales[2])
