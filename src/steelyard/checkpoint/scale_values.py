"""Checks that stored scales and zero points are usable, and match the report of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from steelyard.checkpoint.structure import Structure
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.formats.module_tensors import values_of
from steelyard.formats.scale_codes import stored_scale_values
from steelyard.formats.signed_scales import reads_signed_scales
from steelyard.formats.tensor_names import (
    GLOBAL_SCALE,
    SCALE,
    SHAPE,
    base_of,
    is_scale,
    is_zero_point,
)
from steelyard.kernels.rounding import quantized_range

__all__ = ["ReportedScales", "reported_scales", "state_values", "weight_values"]

_DIGITS = 1e-4  # relative; a report holds six digits


@dataclass(frozen=True)
class ReportedScales:
    """Scales of one module in the report of a run.

    weight: smallest and largest effective scale of its weight
    others: scale -> its smallest and largest value, such as `input_scale`
    """

    weight: tuple[float, float] | None = None
    others: dict[str, tuple[float, float]] = field(default_factory=dict)


def weight_values(
    written: WrittenCheckpoint, broken: set[str], allow_negative: bool | None
) -> Iterator[str]:
    """Yield scales that are not valid divisors, and zero points outside the quantized type."""
    for module, scheme in written.schemes.items():
        values = values_of(scheme)
        for local in sorted(written.tensors[module]):
            args = values.get(base_of(local) or "")
            if args is not None:
                signed = args is scheme.weights and args.type == "int" and args.symmetric
                name = f"{module}.{local}"
                allowed = reads_signed_scales(scheme) if allow_negative is None else allow_negative
                yield from _check(written, name, args, allowed and bool(signed))
        if SHAPE in written.tensors[module] and module not in broken:
            stored = tuple(written.shards.read(f"{module}.{SHAPE}").tolist())
            if stored != written.shape(module):
                yield f"{module}.{SHAPE} says {stored}; expected {written.shape(module)}"


def state_values(structure: Structure) -> Iterator[str]:
    """Yield the same for a quantized cache and other attention states."""
    written = structure.written
    cache = written.quantization.kv_cache_scheme
    groups: list[QuantizationScheme] = list(written.quantization.config_groups.values())
    for module, names in structure.states().items():
        scheme = written.scheme_of(module)
        used = cache or (scheme.input_activations if scheme is not None else None)
        if used is None:
            used = next((g.input_activations for g in groups if not g.weights), None)
        for local in sorted(names):
            if used is None:
                yield f"{module}.{local} exists, but the config quantizes no such state"
            else:
                yield from _check(written, f"{module}.{local}", used, signed=False)


def _check(
    written: WrittenCheckpoint, name: str, args: QuantizationArgs, signed: bool
) -> Iterator[str]:
    if is_scale(name):
        value = stored_scale_values(written.shards.read(name)).float()
        for what, bad in (
            ("not finite", ~torch.isfinite(value)),
            ("zero", value == 0),
            ("negative", (value < 0) & torch.tensor(not signed)),
        ):
            if bool(bad.any()):
                yield f"{name} has {int(bad.sum())} of {value.numel()} values that are {what}"
    elif is_zero_point(name) and written.shards.info(name).dtype != torch.int32:
        # packed zero points use all their bits, so none is outside
        low, high = quantized_range(args)
        value = written.shards.read(name).float()
        bad = ~((value >= low) & (value <= high))
        if bool(bad.any()):
            yield f"{name} has {int(bad.sum())} values outside {low:g} to {high:g}"


def reported_scales(
    written: WrittenCheckpoint, reported: Mapping[str, ReportedScales]
) -> Iterator[str]:
    """Yield scales whose smallest or largest value is not the reported one."""
    for module, scales in reported.items():
        for local, ends in scales.others.items():
            name = f"{module}.{local}"
            if name in written.shards:
                yield from _compare(name, written.shards.read(name).float(), ends)
        name, second = f"{module}.{SCALE}", f"{module}.{GLOBAL_SCALE}"
        if scales.weight is not None and name in written.shards:
            value = stored_scale_values(written.shards.read(name)).float().abs()
            if second in written.shards:
                value = value / written.shards.read(second).float()
            yield from _compare(name, value, scales.weight)


def _compare(name: str, value: torch.Tensor, ends: tuple[float, float]) -> Iterator[str]:
    if not value.numel():
        return
    found = tuple(float(end) for end in value.aminmax())
    if not all(math.isclose(a, b, rel_tol=_DIGITS) for a, b in zip(found, ends, strict=True)):
        yield (
            f"{name} is {found[0]:.6g} to {found[1]:.6g}; report.json has {ends[0]:.6g} to "
            f"{ends[1]:.6g}"
        )
