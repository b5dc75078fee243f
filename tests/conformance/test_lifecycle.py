"""Bad input, reset, files and the registry: what an observer does around its arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_matrix import (
    IMPORTANCE_OBSERVERS,
    OBSERVERS,
    PAIRS,
    args_of,
    assert_same_qparams,
    assert_same_snapshot,
    build,
    formats_of,
    full_dump,
    gather_importance,
    observe,
    observed,
    snapshot,
    value_of,
)

from steelyard.observers import Observer

CASES = [(b, s, n) for b, s in PAIRS for n in formats_of(s, ["int4_asym", "NVFP4", "MXFP8"])]

every_observer = pytest.mark.parametrize("observer_name", OBSERVERS)
every_case = pytest.mark.parametrize(("base", "strategy", "name"), CASES)


@every_case
@every_observer
def test_empty_value_changes_nothing(
    observer_name: str, base: str, strategy: str, name: str
) -> None:
    value = value_of(base, torch.bfloat16)
    observer = build(observer_name, base, args_of(base, strategy, name))
    for empty in (value[:0], value[..., :0], value.to(torch.float32)[:0]):
        untouched = snapshot(observer)
        assert observer(empty) is observer
        assert_same_snapshot(snapshot(observer), untouched)
    assert not observer.has_statistics

    qparams = observe(observer, value).get_qparams()
    for empty in (value[:0], value[..., :0], value.to(torch.float32)[:0]):
        before = snapshot(observer)
        assert observer(empty) is observer
        assert_same_snapshot(snapshot(observer), before)
    assert_same_qparams(observer.get_qparams(), qparams)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([float("nan")], r"1 NaN of \d+ values"),
        ([float("inf")], r"1 infinite of \d+ values"),
        ([float("-inf")], r"1 infinite of \d+ values"),
        ([float("inf"), float("-inf")], r"2 infinite of \d+ values"),
        ([float("nan"), float("inf"), float("nan")], r"2 NaN and 1 infinite of \d+ values"),
    ],
    ids=lambda case: "_".join(map(str, case)) if isinstance(case, list) else "",
)
@every_case
@every_observer
def test_non_finite_value_is_refused(
    observer_name: str, base: str, strategy: str, name: str, bad: list[float], message: str
) -> None:
    value = value_of(base, torch.float32, seed=1) * 3
    value.view(-1)[11 : 11 + len(bad)] = torch.tensor(bad, dtype=value.dtype)

    fresh = build(observer_name, base, args_of(base, strategy, name))
    fresh.module_name = "model.layers.0"
    untouched = snapshot(fresh)
    with pytest.raises(ValueError, match=rf"^{base} of model\.layers\.0 .*{message}"):
        fresh(value)
    assert_same_snapshot(snapshot(fresh), untouched)
    assert not fresh.has_statistics

    observer = observed(
        observer_name, base, args_of(base, strategy, name), value_of(base, torch.bfloat16)
    )
    before, qparams = snapshot(observer), observer.get_qparams()
    with pytest.raises(ValueError, match=message):
        observer(value)
    assert_same_snapshot(snapshot(observer), before)
    assert_same_qparams(observer.get_qparams(), qparams)


@every_case
@every_observer
def test_parameters_need_an_observation(
    observer_name: str, base: str, strategy: str, name: str
) -> None:
    observer = build(observer_name, base, args_of(base, strategy, name))
    assert not observer.has_statistics
    with pytest.raises(AssertionError, match="No statistics available"):
        observer.get_qparams()
    with pytest.raises(AssertionError, match="No statistics available"):
        _scale, _zero_point = observer


@every_case
@every_observer
def test_reset_forgets(observer_name: str, base: str, strategy: str, name: str) -> None:
    args = args_of(base, strategy, name)
    observer = build(observer_name, base, args)
    new = snapshot(observer)
    observe(observer, value_of(base, torch.float32, seed=1) * 100)
    assert observer.has_statistics
    observer.reset()
    assert_same_snapshot(snapshot(observer), new)
    with pytest.raises(AssertionError, match="No statistics available"):
        observer.get_qparams()

    value = value_of(base, torch.bfloat16)
    observe(observer, value)
    assert_same_qparams(
        observer.get_qparams(), observed(observer_name, base, args, value).get_qparams()
    )


@every_case
@every_observer
def test_statistics_survive_a_file(
    observer_name: str, base: str, strategy: str, name: str, tmp_path
) -> None:
    args, path = args_of(base, strategy, name), tmp_path / "statistics.safetensors"
    values = [value_of(base, torch.bfloat16, seed) for seed in range(3)]
    observer = observed(observer_name, base, args, *values)
    before = snapshot(observer)
    observer.save_statistics(path)
    assert_same_snapshot(snapshot(observer), before)

    loaded = build(observer_name, base, args)
    assert loaded.load_statistics(path) is loaded
    assert loaded.has_statistics
    assert (loaded.num_updates, loaded.num_observed_tokens) == (3, before["tokens"])
    assert_same_qparams(loaded.get_qparams(), observer.get_qparams())

    # a run that was cut here goes on as if it had not been
    last = value_of(base, torch.bfloat16, seed=9)
    assert_same_qparams(observe(loaded, last).get_qparams(), observe(observer, last).get_qparams())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "left-over files"


@pytest.mark.parametrize(
    ("base", "strategy", "name"),
    [("weight", "channel", "int4_asym"), ("input", "tensor", "int8"), ("k", "attn_head", "fp8")],
)
@every_observer
def test_inference_mode_leaves_no_trace(
    observer_name: str, base: str, strategy: str, name: str, tmp_path
) -> None:
    """Calibration may run in inference mode; what follows it need not."""
    args = args_of(base, strategy, name)
    values = [value_of(base, torch.bfloat16, seed) for seed in range(3)]
    with torch.inference_mode():
        observer = observed(observer_name, base, args, values[0].clone())
    usual = observed(observer_name, base, args, values[0])
    assert_same_qparams(observer.get_qparams(), usual.get_qparams())
    observer.save_statistics(tmp_path / "statistics.safetensors")
    if observer._act_sync_dict:
        other = observed(observer_name, base, args, values[1])
        observer.merge(other)
        usual.merge(other)
    observe(observer, values[2])
    observe(usual, values[2])
    assert_same_qparams(observer.get_qparams(), usual.get_qparams())


@every_observer
def test_both_ways_to_load_from_the_registry(observer_name: str) -> None:
    args = args_of("weight", "group", "int4_asym")
    first = Observer.load_from_registry(observer_name, quantization_args=args)
    second = Observer.load_from_registry(observer_name, base_name="weight", args=args)
    third = Observer.get_value_from_registry(observer_name)("weight", args)
    assert first.base_name == second.base_name == third.base_name == "weight"
    value = value_of("weight", torch.bfloat16)
    expected = observe(second, value).get_qparams()
    assert_same_qparams(observe(first, value).get_qparams(), expected)
    assert_same_qparams(observe(third, value).get_qparams(), expected)
    assert type(Observer.load_from_registry(observer_name.upper(), args=args)) is type(first)


@every_observer
def test_gradients_are_left_alone(observer_name: str) -> None:
    weight = torch.nn.Parameter(value_of("weight", torch.float32))
    args = args_of("weight", "tensor_group", "NVFP4")
    qparams = observed(observer_name, "weight", args, weight).get_qparams()
    assert weight.grad is None
    assert not any(tensor.requires_grad for tensor in qparams.values())


@every_observer
def test_power_of_two_scales_have_no_global_scale(observer_name: str) -> None:
    """E8M0 reaches every magnitude by itself; a global scale beside it has no meaning."""
    args = args_of("weight", "group", "MXFP4").model_copy(update={"strategy": "tensor_group"})
    with pytest.raises(ValueError, match="group"):
        build(observer_name, "weight", args)


@pytest.mark.parametrize("strategy", ["channel", "group", "tensor_group"])
@pytest.mark.parametrize("observer_name", IMPORTANCE_OBSERVERS)
def test_strict_importance_changes_nothing_when_it_raises(
    observer_name: str, strategy: str
) -> None:
    value = value_of("weight", torch.bfloat16)
    fresh = build(observer_name, "weight", args_of("weight", strategy, "int4"), strict=True)
    untouched = snapshot(fresh)
    with pytest.raises(ValueError, match="importance is missing"):
        fresh(value)
    assert_same_snapshot(snapshot(fresh), untouched)

    observer = gather_importance(
        build(observer_name, "weight", args_of("weight", strategy, "int4"), strict=True)
    )
    observer(value)
    observer._imatrix_sum[3] = float("nan")
    before = snapshot(observer)
    with pytest.raises(ValueError, match="importance has 1 non-finite"):
        observer(3 * value.float())
    assert_same_snapshot(snapshot(observer), before)


def declared_options(observer_name: str) -> dict[str, Any]:
    """Return each option an observer declares with its default."""
    declared = Observer.get_value_from_registry(observer_name).Options
    if declared is None:
        return {}
    return {name: field.default for name, field in declared.model_fields.items()}


@every_observer
def test_options_come_from_args_or_constructor(observer_name: str) -> None:
    options = declared_options(observer_name)
    in_args = args_of("weight", "channel", "int4", observer_kwargs=dict(options))
    without = args_of("weight", "channel", "int4")
    given = full_dump(in_args), full_dump(without)
    observers = [
        build(observer_name, "weight", in_args),
        build(observer_name, "weight", without, **options),
        build(observer_name, "weight", in_args, **options),
        build(observer_name, "weight", without),
    ]
    assert observers[0].options == observers[1].options == observers[2].options
    assert observers[0].options == observers[3].options, "defaults given by name change nothing"
    for observer in observers[:3]:
        assert observer.args.observer_kwargs == options
        observe(observer, value_of("weight", torch.bfloat16)).get_qparams()
        observer.args.observer_kwargs["probe"] = 1  # its own copy
    assert (full_dump(in_args), full_dump(without)) == given, "the caller's args were modified"


@every_observer
def test_unknown_option_is_refused_with_the_nearest(observer_name: str) -> None:
    if Observer.get_value_from_registry(observer_name).Options is None:
        pytest.skip("declares no options, so it takes any")
    options = declared_options(observer_name)
    for known, default in options.items():
        wrong = known[:-1]
        for kwargs, constructor in (({wrong: default}, {}), ({}, {wrong: default})):
            args = args_of("weight", "channel", "int4", observer_kwargs=kwargs)
            with pytest.raises(ValueError, match=f"{wrong!r}: did you mean {known!r}"):
                build(observer_name, "weight", args, **constructor)
    with pytest.raises(ValueError, match="unknown option 'zzz': known: ") as caught:
        build(observer_name, "weight", args_of("weight", "channel", "int4"), zzz=1)
    for known in options or ["none"]:
        assert known in str(caught.value)
