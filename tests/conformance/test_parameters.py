"""Parameters of every observer, for every strategy, format and type: shape, storage, repetition."""

from __future__ import annotations

import pytest
import torch
from conformance_matrix import (
    BLOCK,
    DTYPES,
    IMPORTANCE_OBSERVERS,
    OBSERVERS,
    ONE_OF_EACH_KIND,
    PAIRS,
    SHAPES,
    args_of,
    assert_same_qparams,
    assert_same_snapshot,
    assert_stored_well,
    build,
    case,
    formats_of,
    full_dump,
    gather_importance,
    observe,
    observed,
    registered_by_compressed_tensors,
    snapshot,
    value_of,
)

MATRIX = [(base, strategy, name) for base, strategy in PAIRS for name in formats_of(strategy)]
WEIGHTS = [entry for entry in MATRIX if entry[0] == "weight"]


def test_the_matrix_is_whole() -> None:
    assert len(OBSERVERS) >= 6
    assert {base for base, _ in PAIRS} == {"weight", "input", "output", "q", "k", "v"}
    for entry in [("weight", "tensor_group", "NVFP4"), ("weight", "block", "fp8")]:
        assert entry in MATRIX
    assert {name for _, _, name in MATRIX} >= {"int2", "int8_asym", "MXFP4", "MXFP8"}


@pytest.mark.parametrize(("base", "strategy"), PAIRS)
@pytest.mark.parametrize("observer_name", OBSERVERS)
def test_parameters(observer_name: str, base: str, strategy: str) -> None:
    # every type where kinds differ; one type for the names that are treated as another one is
    dtypes = DTYPES if (base, strategy) in ONE_OF_EACH_KIND else [torch.bfloat16]
    for name in formats_of(strategy):
        for dtype in dtypes:
            with case(name, dtype):
                check_parameters(observer_name, base, strategy, name, dtype)


def check_parameters(
    observer_name: str, base: str, strategy: str, name: str, dtype: torch.dtype
) -> None:
    args = args_of(base, strategy, name)
    given = full_dump(args)
    observer = build(observer_name, base, args)
    assert observe(observer, value_of(base, dtype)) is observer

    before = snapshot(observer)
    qparams = observer.get_qparams()
    assert_stored_well(qparams, args, dtype)

    for key, (shape, zp_dtype) in registered_by_compressed_tensors(base, strategy, name).items():
        assert tuple(qparams[key].shape) == shape, key
        if key == "zero_point":
            assert qparams[key].dtype == zp_dtype

    assert_same_qparams(observer.get_qparams(), qparams)
    scale, zero_point = observer
    again = {"scale": scale, "zero_point": zero_point, "global_scale": qparams["global_scale"]}
    assert_same_qparams(again, qparams)
    assert_same_snapshot(snapshot(observer), before)
    assert full_dump(args) == given, "the caller's QuantizationArgs were modified"


@pytest.mark.parametrize(("base", "strategy", "name"), WEIGHTS)
@pytest.mark.parametrize("observer_name", IMPORTANCE_OBSERVERS)
def test_parameters_with_importance(
    observer_name: str, base: str, strategy: str, name: str
) -> None:
    args = args_of(base, strategy, name)
    observer = gather_importance(build(observer_name, base, args))
    observer(value_of(base, torch.bfloat16))  # a warning would be an error here
    before = snapshot(observer)
    qparams = observer.get_qparams()
    assert_stored_well(qparams, args, torch.bfloat16)
    for key, (shape, _) in registered_by_compressed_tensors(base, strategy, name).items():
        assert tuple(qparams[key].shape) == shape, key
    assert_same_qparams(observer.get_qparams(), qparams)
    assert_same_snapshot(snapshot(observer), before)


@pytest.mark.parametrize(
    ("base", "strategy", "name"),
    [
        ("weight", "channel", "int4_asym"),
        ("weight", "group", "int8"),
        ("weight", "block", "fp8"),
        ("weight", "tensor_group", "NVFP4"),
        ("weight", "group", "MXFP4"),
        ("input", "tensor", "int8_asym"),
        ("k", "attn_head", "fp8"),
    ],
)
@pytest.mark.parametrize("observer_name", OBSERVERS)
def test_parameters_of_float64(observer_name: str, base: str, strategy: str, name: str) -> None:
    args = args_of(base, strategy, name)
    narrow = observed(observer_name, base, args, value_of(base, torch.float32))
    wide = observed(observer_name, base, args, value_of(base, torch.float64))
    qparams = wide.get_qparams()
    assert_stored_well(qparams, args, torch.float64)
    # the same numbers, so the same parameters up to what fp32 rounds away
    for key, expected in narrow.get_qparams().items():
        if expected is not None:
            torch.testing.assert_close(
                qparams[key].double(), expected.double(), rtol=1e-6, atol=0, msg=key
            )


def place_of(base: str, strategy: str, place: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the parameter of one element lies."""
    if strategy == "tensor":
        return (0,)
    if strategy in ("group", "tensor_group"):
        return (*(place[:-1] if base == "weight" else ()), place[-1] // 16)
    if strategy == "block":
        return place[0] // BLOCK[0], place[1] // BLOCK[1]
    return {"channel": (place[0], 0), "token": (*place[:2], 0), "attn_head": (place[1], 0, 0)}[
        strategy
    ]


@pytest.mark.parametrize(("base", "strategy"), PAIRS)
@pytest.mark.parametrize("observer_name", OBSERVERS)
def test_parameters_belong_to_their_values(observer_name: str, base: str, strategy: str) -> None:
    """One large element enlarges its own parameter and no other."""
    args = args_of(base, strategy, "int4")
    shape = torch.Size(SHAPES[base])
    for flat in range(5, shape.numel(), 53):
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))
        value = torch.ones(shape)
        value[place] = 1e6
        qparams = observed(observer_name, base, args, value).get_qparams()
        scale = qparams["scale"]
        if qparams["global_scale"] is not None:
            scale = scale / qparams["global_scale"]
        large = (scale > 1e3).nonzero().tolist()
        assert large == [list(place_of(base, strategy, place))], f"element {place}"


@pytest.mark.parametrize("observer_name", OBSERVERS)
@pytest.mark.parametrize(("base", "strategy"), PAIRS)
def test_call_unpacks_to_scale_and_zero_point(observer_name: str, base: str, strategy: str) -> None:
    args = args_of(base, strategy, "int4_asym")
    observer = build(observer_name, base, args)
    scale, zero_point = observe(observer, value_of(base, torch.bfloat16))
    qparams = observed(observer_name, base, args, value_of(base, torch.bfloat16)).get_qparams()
    torch.testing.assert_close(scale, qparams["scale"], rtol=0, atol=0)
    torch.testing.assert_close(zero_point, qparams["zero_point"], rtol=0, atol=0)
