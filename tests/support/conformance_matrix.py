"""What the conformance suite runs over: every observer, kind of value, strategy, format and type.

Observers come from the registry and strategies from the package, so a new one of either is
covered without an edit here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from steelyard.errors import ImportanceWarning
from steelyard.observers import IMatrixMSEObserver, Observer
from steelyard.observers.helpers import STRATEGIES

OBSERVERS = sorted(
    {
        cls: name
        for name in Observer.registered_names()
        if (cls := Observer.get_value_from_registry(name)).__module__.startswith("steelyard.")
    }.values()
)
"""The package's own, each under one of its names; other tests register some of their own."""

IMPORTANCE_OBSERVERS = [
    name
    for name in OBSERVERS
    if "_imatrix_sum" in Observer.get_value_from_registry(name)._act_sync_dict
]
PAIRS = [(base, strategy) for base, strategies in STRATEGIES.items() for strategy in strategies]
ONE_OF_EACH_KIND = [(base, s) for base, s in PAIRS if base in ("weight", "input", "q")]
"""Pairs without the base names that are treated as another one is: output as input, k, v as q."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
if int(version("compressed-tensors").split(".")[1]) < 20:  # run once more, for its interface alone
    DTYPES = [torch.bfloat16]

PRESETS = {"NVFP4": "tensor_group", "MXFP4": "group", "MXFP8": "group"}
_INTEGERS = {
    f"int{bits}{suffix}": {"num_bits": bits, "type": "int", "symmetric": suffix == ""}
    for bits in range(2, 9)
    for suffix in ("", "_asym")
}
_FLOATS = {
    "fp8": {"num_bits": 8, "type": "float"},
    "fp8_asym": {"num_bits": 8, "type": "float", "symmetric": False},
    "fp4": {"num_bits": 4, "type": "float"},
}
FORMATS = [*_INTEGERS, *_FLOATS, *PRESETS]

# one value of each kind; the weight's rows do not divide into blocks
ROWS, COLUMNS, HEADS, HEAD_DIM = 6, 64, 4, 16
SHAPES = {
    "weight": (ROWS, COLUMNS),
    **dict.fromkeys(("input", "output"), (2, 3, COLUMNS)),
    **dict.fromkeys(("q", "k", "v"), (2, HEADS, 3, HEAD_DIM)),
}
BLOCK = [4, 16]


@contextlib.contextmanager
def case(*parts: Any) -> Iterator[None]:
    """Name a case of a test that goes through many, each too small for a test of its own."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{' '.join(map(str, parts))}: {error}") from error


def formats_of(strategy: str, names: Iterable[str] = FORMATS) -> list[str]:
    """Return those of `names` that go with a strategy; a preset goes with its own only."""
    return [name for name in names if PRESETS.get(name, strategy) == strategy]


def args_of(base_name: str, strategy: str, name: str, **changes: Any) -> QuantizationArgs:
    """Return fresh args for a format, with a preset's own ones where the format is a preset."""
    if name in PRESETS:
        scheme = preset_name_to_scheme(name, ["Linear"])
        # an attention state has no preset of its own, a group of 16 or 32 does not divide it
        preset = scheme.weights if base_name == "weight" else scheme.input_activations
        return preset.model_copy(update=changes)
    shape: dict[str, Any] = {"strategy": strategy}
    if strategy in ("group", "tensor_group"):
        shape["group_size"] = 16
    if strategy == "block":
        shape["block_structure"] = BLOCK
    if strategy == "token":
        shape["dynamic"] = True
    return QuantizationArgs(**{**shape, **(_INTEGERS | _FLOATS)[name], **changes})


def value_of(base_name: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a random value of its kind's usual shape, with one outlier."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(SHAPES[base_name], generator=generator)
    value.view(-1)[7] = -5.0
    return value.to(dtype)


def build(name: str, base_name: str, args: QuantizationArgs, **options: Any) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args, **options)


def observe(observer: Observer, value: torch.Tensor) -> Observer:
    """Observe; an observer that goes without importance must say so each time."""
    if isinstance(observer, IMatrixMSEObserver) and observer._imatrix_sum is None:
        with pytest.warns(ImportanceWarning):
            return observer(value)
    return observer(value)


def observed(name: str, base_name: str, args: QuantizationArgs, *values: torch.Tensor) -> Observer:
    """Return a new observer that has observed `values`."""
    observer = build(name, base_name, args)
    for value in values:
        observe(observer, value)
    return observer


def gather_importance(observer: Observer) -> Observer:
    """Let an observer of a weight see a few inputs of its layer."""
    module = torch.nn.Linear(COLUMNS, 1, bias=False)
    observer.attach(module)
    module(value_of("input", torch.float32, seed=1) * torch.linspace(0, 4, COLUMNS))
    observer.detach(module)
    return observer


@functools.cache
def registered_by_compressed_tensors(
    base_name: str, strategy: str, name: str
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return parameter -> (shape, type) as compressed-tensors registers it for such a value."""
    args = args_of(base_name, strategy, name)
    module: torch.nn.Module = torch.nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
    if strategy == "token":  # never stored, so never registered: computed for each value
        value = value_of(base_name, torch.bfloat16)
        scale, zero_point = compute_dynamic_scales_and_zp(value, args, module)
        return {
            "scale": (tuple(scale.shape), scale.dtype),
            "zero_point": (tuple(zero_point.shape), zero_point.dtype),
        }
    if base_name == "weight":
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        initialize_module_for_quantization(module, scheme)
    else:
        static = args.model_copy(update={"dynamic": False})
        shape = (HEADS, None, HEAD_DIM) if base_name in ("q", "k", "v") else (COLUMNS,)
        initialize_qparams(module, base_name, static, shape, torch.bfloat16)
    return {
        key.removeprefix(f"{base_name}_"): (tuple(parameter.shape), parameter.dtype)
        for key, parameter in module.named_parameters()
        if key.startswith(f"{base_name}_")
    }


def snapshot(observer: Observer) -> dict[str, Any]:
    """Return everything that an observation changes, copied."""
    return {
        "statistics": {k: v.clone() for k, v in observer.get_statistics().items()},
        "updates": observer.num_updates,
        "tokens": observer.num_observed_tokens,
        "dtype": observer.observed_dtype,
        "shape": observer.observed_shape,
        "has_statistics": observer.has_statistics,
    }


def assert_same_snapshot(after: dict[str, Any], before: dict[str, Any]) -> None:
    torch.testing.assert_close(
        after.pop("statistics"), before.pop("statistics"), rtol=0, atol=0, equal_nan=True
    )
    assert after == before


def assert_same_qparams(actual: Any, expected: Any) -> None:
    assert list(actual) == ["scale", "zero_point", "global_scale"]
    for name in expected:
        assert (actual[name] is None) == (expected[name] is None), name
        if expected[name] is not None:
            assert actual[name].dtype == expected[name].dtype, name
            assert bool((bits(actual[name]) == bits(expected[name])).all()), (
                f"{name}: {actual[name]} is not {expected[name]}"
            )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def full_dump(args: QuantizationArgs) -> dict[str, Any]:
    """Return all fields, also those that compressed-tensors leaves out of a dump."""
    return copy.deepcopy({"dump": args.model_dump(), "fields": dict(args), "set": _set(args)})


def _set(args: QuantizationArgs) -> set[str]:
    return set(args.model_fields_set)


def assert_stored_well(qparams: Any, args: QuantizationArgs, dtype: torch.dtype) -> None:
    """Check scale, zero point and global scale against what the file can hold."""
    scale, zero_point, global_scale = qparams.values()
    assert_positive_and_finite("scale", scale)
    if args.scale_dtype is None:
        assert scale.dtype == dtype
    else:
        codes = torch.tensor(list(_codes(args.scale_dtype)), dtype=torch.float64)
        wrong = ~torch.isin(scale.double(), codes)
        assert not bool(wrong.any()), f"{scale[wrong]} are not codes of {args.scale_dtype}"

    low, high = _quantized_range(args)
    assert zero_point.dtype == args.zp_dtype
    assert zero_point.shape == scale.shape
    wide = zero_point.double()
    assert bool(((wide >= low) & (wide <= high)).all()), f"{zero_point} not in [{low}, {high}]"
    if args.symmetric:
        assert not bool(wide.any()), f"symmetric, but zero points are {zero_point}"

    assert (global_scale is not None) == (args.strategy == "tensor_group")
    if global_scale is not None:
        assert global_scale.dtype == torch.float32
        assert tuple(global_scale.shape) == (1,)
        assert_positive_and_finite("global scale", global_scale)
        assert_positive_and_finite("effective scale", scale.float() / global_scale)


def assert_positive_and_finite(what: str, tensor: torch.Tensor) -> None:
    assert bool((torch.isfinite(tensor) & (tensor > 0)).all()), f"{what}: {tensor}"


def _quantized_range(args: QuantizationArgs) -> tuple[float, float]:
    if args.type == "float":
        largest = {4: 6.0, 8: 448.0}[args.num_bits]
        return -largest, largest
    return -(2.0 ** (args.num_bits - 1)), 2.0 ** (args.num_bits - 1) - 1


def _codes(scale_dtype: torch.dtype) -> Iterator[float]:
    """Yield all positive values of a one-byte scale."""
    if scale_dtype == torch.uint8:  # E8M0; code 255 is NaN
        yield from (2.0**exponent for exponent in range(-127, 128))
    else:  # E4M3; exponent 15 with mantissa 7 is NaN
        assert scale_dtype == torch.float8_e4m3fn
        for exponent in range(16):
            for mantissa in range(8):
                if (exponent, mantissa) not in ((0, 0), (15, 7)):
                    significand = mantissa / 8 + (exponent > 0)
                    yield math.ldexp(significand, max(exponent, 1) - 7)
