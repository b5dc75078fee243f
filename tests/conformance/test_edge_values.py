"""Values at the edge of their type, and in unusual memory, still give scales that can be stored."""

from __future__ import annotations

import itertools

import pytest
import torch
from conformance_matrix import (
    DTYPES,
    OBSERVERS,
    ONE_OF_EACH_KIND,
    args_of,
    assert_same_qparams,
    assert_stored_well,
    case,
    formats_of,
    observe,
    observed,
    value_of,
)

NAMES = ["int2_asym", "int4", "int8_asym", "fp8", "NVFP4", "MXFP4", "MXFP8"]


def zeros(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value)


def some_groups_zero(value: torch.Tensor) -> torch.Tensor:
    """Every second half row is zero, so is every second token and head."""
    value = value.clone()
    value[::2] = 0
    value[..., : value.shape[-1] // 2] = 0
    return value


def denormals(value: torch.Tensor) -> torch.Tensor:
    smallest = torch.finfo(value.dtype).smallest_normal * torch.finfo(value.dtype).eps
    counts = (torch.arange(value.numel()) % 7 - 3).reshape(value.shape)
    return (counts.double() * smallest).to(value.dtype)


def one_denormal(value: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(value)
    info = torch.finfo(value.dtype)
    result.view(-1)[3] = info.smallest_normal * info.eps
    return result


def largest(value: torch.Tensor) -> torch.Tensor:
    signs = torch.sign(value) + (value == 0)
    return signs * torch.finfo(value.dtype).max


def largest_positive(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, torch.finfo(value.dtype).max)


def largest_negative(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, torch.finfo(value.dtype).min)


def largest_beside_denormal(value: torch.Tensor) -> torch.Tensor:
    result = denormals(value)
    result.view(-1)[5] = torch.finfo(value.dtype).max
    result.view(-1)[6] = torch.finfo(value.dtype).min
    return result


EDGES = [
    zeros,
    some_groups_zero,
    denormals,
    one_denormal,
    largest,
    largest_positive,
    largest_negative,
    largest_beside_denormal,
]


@pytest.mark.parametrize(("base", "strategy"), ONE_OF_EACH_KIND)
@pytest.mark.parametrize("observer_name", OBSERVERS)
def test_edge_values(observer_name: str, base: str, strategy: str) -> None:
    for name, edge, dtype in itertools.product(formats_of(strategy, NAMES), EDGES, DTYPES):
        args = args_of(base, strategy, name)
        value = edge(value_of(base, dtype))
        assert bool(torch.isfinite(value).all()), "the case itself is wrong"
        with case(name, edge.__name__, dtype):
            observer = observed(observer_name, base, args, value)
            assert_stored_well(observer.get_qparams(), args, dtype)
            if observer._act_sync_dict:  # it averages or accumulates, and goes on from there
                observe(observer, value_of(base, dtype))
                assert_stored_well(observer.get_qparams(), args, dtype)


SINGLE = {
    ("weight", "tensor"): ((1, 1), {}),
    ("weight", "channel"): ((5, 1), {}),
    ("weight", "group"): ((3, 4), {"group_size": 1}),
    ("weight", "tensor_group"): ((3, 4), {"group_size": 1}),
    ("weight", "block"): ((3, 4), {"block_structure": [1, 1]}),
    ("input", "tensor"): ((1, 1, 1), {}),
    ("input", "token"): ((2, 3, 1), {}),
    ("input", "group"): ((1, 1, 4), {"group_size": 1}),
    ("input", "tensor_group"): ((1, 1, 4), {"group_size": 1}),
    ("q", "tensor"): ((1, 1, 1, 1), {}),
    ("q", "attn_head"): ((1, 4, 1, 1), {}),
}


@pytest.mark.parametrize("name", ["int4", "int8_asym", "fp8"])
@pytest.mark.parametrize(("base", "strategy"), ONE_OF_EACH_KIND)
@pytest.mark.parametrize("observer_name", OBSERVERS)
def test_groups_of_one(observer_name: str, base: str, strategy: str, name: str) -> None:
    shape, changes = SINGLE[base, strategy]
    args = args_of(base, strategy, name, **changes)
    numbers = torch.linspace(-3, 3, torch.Size(shape).numel()).reshape(shape)
    for dtype in DTYPES:
        qparams = observed(observer_name, base, args, numbers.to(dtype)).get_qparams()
        assert_stored_well(qparams, args, dtype)
        assert qparams["scale"].numel() == numbers.numel()


def transposed(value: torch.Tensor) -> torch.Tensor:
    """The same value, laid out the other way round."""
    order = tuple(reversed(range(value.ndim)))
    return value.permute(order).contiguous().permute(order)


def every_second(value: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*value.shape[:-1], 2 * value.shape[-1]), 9.0, dtype=value.dtype)
    wide[..., ::2] = value
    return wide[..., ::2]


def with_offset(value: torch.Tensor) -> torch.Tensor:
    storage = torch.full((value.numel() + 3,), 9.0, dtype=value.dtype)
    storage[3:] = value.flatten()
    return storage[3:].view(value.shape)


def expanded(value: torch.Tensor) -> torch.Tensor:
    return value[:1].expand(value.shape)


def expanded_scalar(value: torch.Tensor) -> torch.Tensor:
    return value.flatten()[7].expand(value.shape)


@pytest.mark.parametrize(
    "layout",
    [transposed, every_second, with_offset, expanded, expanded_scalar],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    ("base", "strategy", "name"),
    [(b, s, n) for b, s in ONE_OF_EACH_KIND for n in formats_of(s, ["int4_asym", "NVFP4"])],
)
@pytest.mark.parametrize("observer_name", OBSERVERS)
def test_memory_layout(
    observer_name: str, base: str, strategy: str, name: str, layout, tmp_path
) -> None:
    args = args_of(base, strategy, name)
    value = layout(value_of(base, torch.bfloat16))
    copied = value.clone(memory_format=torch.contiguous_format)
    if layout not in (with_offset,):
        assert not value.is_contiguous(), "the case itself is wrong"
    observer = observed(observer_name, base, args, value)
    assert_same_qparams(
        observer.get_qparams(), observed(observer_name, base, args, copied).get_qparams()
    )
    torch.testing.assert_close(value, copied, rtol=0, atol=0, msg="the value was modified")
    observer.save_statistics(tmp_path / "statistics.safetensors")
