"""Does a written checkpoint hold what its own config promises?

A server loads a checkpoint that lacks a scale without a word and answers with noise, so "it loads"
proves nothing. Here the files are opened again, from nothing but config.json, and held against the
scheme, the source, and the errors that were reported while quantizing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from steelyard.checkpoint.layout import (
    TensorSpec,
    expected_attention_tensors,
    expected_tensors,
    format_of,
)
from steelyard.checkpoint.shards import Shards
from steelyard.checkpoint.written import PARAMETER, WrittenCheckpoint
from steelyard.errors import CheckpointError
from steelyard.kernels.rounding import quantized_range

__all__ = ["validate_checkpoint"]

_CACHE_PARAMETER = re.compile(r"[qkv]_(scale|zero_point)")
_TOLERANCE = 0.01  # of a reported error, relative
_ENOUGH = 1 << 26  # weights to decode, beyond the first and the last module


def validate_checkpoint(
    folder: str | Path,
    *,
    source: Shards | None = None,
    reported: Mapping[str, float] | None = None,
    samples: int = 8,
    fused: Iterable[tuple[str, ...]] = (),
    allow_negative: bool = False,
    same_bytes: bool = True,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[str]:
    """Return the problems of a checkpoint, one line each; an empty list means that it is good.

    source:         what was quantized; all that was not must still be there
    reported:       module -> relative squared error of its weight, held against the files
    samples:        how many weights are decoded, evenly spread over the model; fewer if they are
                    large
    fused:          modules that the server merges, which must share global and per-tensor scales
    allow_negative: symmetric integer weights may have negative scales
    same_bytes:     compare unquantized tensors byte for byte, not by type and shape alone
    dtypes:         module -> the type that its weight had, where no source tells
    """
    try:
        checkpoint = _Validator(Path(folder), source, dtypes)
    except CheckpointError as error:
        return [str(error)]
    with checkpoint.shards:
        problems = list(checkpoint.structure())
        problems += checkpoint.values(allow_negative)
        problems += checkpoint.cache()
        for modules in fused:
            problems += checkpoint.fusion(modules)
        if source is not None:
            problems += checkpoint.decoded(source, reported, samples)
            problems += checkpoint.carried(source, same_bytes)
    return problems


class _Validator(WrittenCheckpoint):
    """The checks, each of which yields what it finds wrong."""

    def __init__(
        self, folder: Path, source: Shards | None, dtypes: Mapping[str, torch.dtype] | None
    ) -> None:
        super().__init__(folder, source, dtypes)
        self.broken: set[str] = set()  # modules that cannot be decoded, found by `structure`

    # -- what there is ----------------------------------------------------------------------

    def structure(self) -> Iterator[str]:
        """Every tensor that a scheme needs, in its type and shape, and none besides."""
        if not self.schemes and self.quantization.kv_cache_scheme is None and not self.states():
            yield f"{self.shards.folder} has a quantization_config but no quantized module"
        for module, locals_ in self.tensors.items():
            found = {local for local in locals_ if PARAMETER.fullmatch(local)}
            scheme = self.schemes.get(module)
            if scheme is None:
                for local in sorted(found):
                    yield f"{module}.{local} is there, but the config does not quantize {module}"
                continue
            try:
                expected = expected_tensors(scheme, self.shape(module), self.dtype(module))
            except ValueError as error:
                self.broken.add(module)
                yield f"{module}.weight does not fit its scheme: {error}"
                continue
            yield from self._compare(module, expected)
            for local in sorted((found | (locals_ & {"weight"})) - expected.keys()):
                yield f"{module}.{local} is left over: {format_of(scheme)} does not hold it"

    def _compare(self, module: str, expected: Mapping[str, TensorSpec]) -> Iterator[str]:
        for local, (dtype, shape) in expected.items():
            name = f"{module}.{local}"
            info = self.shards.info(name) if name in self.shards else None
            if info is not None and (info.dtype, info.shape) == (dtype, shape):
                continue
            self.broken.add(module)
            found = f"{info.dtype} {info.shape}" if info is not None else "missing"
            yield f"{name} is {found}; expected {dtype} {shape}"

    # -- what it says -----------------------------------------------------------------------

    def values(self, allow_negative: bool) -> Iterator[str]:
        """Scales that can be divided by, zero points inside the quantized type."""
        for module, scheme in self.schemes.items():
            parts = {
                "weight": scheme.weights,
                "input": scheme.input_activations,
                "output": scheme.output_activations,
            }
            for local in sorted(self.tensors[module]):
                match = PARAMETER.fullmatch(local)
                args = parts[match[1]] if match else None
                if args is not None:
                    signed = args is scheme.weights and args.type == "int" and args.symmetric
                    name = f"{module}.{local}"
                    yield from self._check_values(name, args, allow_negative and signed)
            if "weight_shape" in self.tensors[module] and module not in self.broken:
                stored = tuple(self.shards.read(f"{module}.weight_shape").tolist())
                if stored != self.shape(module):
                    yield f"{module}.weight_shape says {stored}; expected {self.shape(module)}"

    def _check_values(self, name: str, args: QuantizationArgs, signed: bool) -> Iterator[str]:
        if name.endswith("_scale"):
            value = self.shards.read(name)
            if value.dtype == torch.uint8:  # exponents; all but the last are powers of two
                value = torch.where(value == 255, torch.nan, 1.0)
            value = value.float()
            for what, bad in (
                ("not finite", ~torch.isfinite(value)),
                ("zero", value == 0),
                ("negative", (value < 0) & torch.tensor(not signed)),
            ):
                if bool(bad.any()):
                    yield f"{name} has {int(bad.sum())} of {value.numel()} values that are {what}"
        elif name.endswith("_zero_point") and self.shards.info(name).dtype != torch.int32:
            # packed zero points fill their bits, and so cannot lie outside
            low, high = quantized_range(args)
            value = self.shards.read(name).float()
            bad = ~((value >= low) & (value <= high))
            if bool(bad.any()):
                yield f"{name} has {int(bad.sum())} values outside {low:g} to {high:g}"

    def cache(self) -> Iterator[str]:
        """Scales of a quantized key and value cache, or of attention's states."""
        args = self.quantization.kv_cache_scheme
        found = self.states()
        if args is not None and not found and args.dynamic is not True:
            yield "k_scale and v_scale are missing, but the config has a static kv_cache_scheme"
        text = self.config.get("text_config") or self.config
        heads = text.get("num_key_value_heads", text.get("num_attention_heads", 1))
        for module, names in found.items():
            if args is not None:
                yield from self._compare(
                    module, expected_attention_tensors(args, self.dtype(module), heads)
                )
            scheme = self._scheme(module)
            used = args or (scheme.input_activations if scheme is not None else None)
            if used is None:
                used = next((g.input_activations for g in self._groups() if not g.weights), None)
            for local in sorted(names):
                if used is None:
                    yield f"{module}.{local} is there, but the config quantizes no such state"
                else:
                    yield from self._check_values(f"{module}.{local}", used, signed=False)

    def states(self) -> dict[str, set[str]]:
        """Modules with parameters of attention's states, and their names."""
        return {
            module: names
            for module, locals_ in self.tensors.items()
            if (names := {local for local in locals_ if _CACHE_PARAMETER.fullmatch(local)})
        }

    def _groups(self) -> list[QuantizationScheme]:
        return list(self.quantization.config_groups.values())

    def fusion(self, modules: tuple[str, ...]) -> Iterator[str]:
        """One scheme, and one value of each scale that the merged layer has but one of."""
        schemes = [self.schemes.get(module) for module in modules]
        first = schemes[0]
        for module, scheme in zip(modules, schemes, strict=True):
            if (scheme is None) != (first is None):
                yield f"{module} is fused with {modules[0]}, but only one of them is quantized"
                return
        if first is None:
            return
        shared = ["weight_global_scale", "input_global_scale"]
        parts = {"weight_scale": first.weights, "input_scale": first.input_activations}
        for local, args in parts.items():
            if args and args.type == "float" and args.strategy == "tensor":
                shared.append(local)
        for local in shared:
            values = {
                name: self.shards.read(name).float().flatten().tolist()
                for name in (f"{module}.{local}" for module in modules)
                if name in self.shards
            }
            for name, value in values.items():
                other = next(iter(values))
                if value != values[other]:
                    yield f"{name} is {value}, but its fused partner {other} is {values[other]}"

    # -- against the source -----------------------------------------------------------------

    def decoded(
        self, source: Shards, reported: Mapping[str, float] | None, samples: int
    ) -> Iterator[str]:
        """A sample of weights, decoded, is as near to the source as was reported."""
        known = [m for m, scheme in self.schemes.items() if scheme.weights is not None]
        known = [m for m in known if m not in self.broken and f"{m}.weight" in source]
        if reported is not None:
            for module in sorted(reported.keys() - self.schemes.keys()):
                yield f"{module}.weight has a reported error, but is not quantized here"
            known = [m for m in known if m in reported]
        sizes = [math.prod(source.info(f"{m}.weight").shape) for m in known]
        enough = _ENOUGH * len(known) // max(sum(sizes), 1)
        for module in _spread(known, min(samples, max(enough, 2))):
            original = source.read(f"{module}.weight")
            try:
                error = _relative_error(self.decode(module), original)
            except (RuntimeError, ValueError, AssertionError, KeyError) as failure:
                yield f"{module}.weight cannot be decoded: {failure}"
                continue
            limit = (reported[module] if reported else float("inf")) * (1 + _TOLERANCE)
            limit += self._precision(module)
            if not error <= limit:  # also where it is NaN
                yield f"{module}.weight decodes with a relative error of {error:.4g}; reported " + (
                    f"{reported[module]:.4g}" if reported else "none"
                )

    def _precision(self, module: str) -> float:
        """Return the relative squared error of decoding itself: in bf16 where scales are codes."""
        scale = f"{module}.weight_scale"
        codes = scale in self.shards and self.shards.info(scale).dtype.itemsize == 1
        return 2.0**-15 if codes else 1e-12

    def carried(self, source: Shards, same_bytes: bool) -> Iterator[str]:
        """What was not quantized is there as it was."""
        for name in source:
            module, _, local = name.rpartition(".")
            if module in self.schemes and local == "weight":
                continue
            if name not in self.shards:
                if not self._was_split(name, source):
                    yield f"{name} is in the source, but missing here"
                continue
            there, here = source.info(name), self.shards.info(name)
            if (there.dtype, there.shape) != (here.dtype, here.shape):
                yield (
                    f"{name} is {here.dtype} {here.shape}; "
                    f"the source has {there.dtype} {there.shape}"
                )
            elif same_bytes and not self.shards.equal(name, source):
                yield f"{name} is not quantized, but its values differ from the source"

    def _was_split(self, name: str, source: Shards) -> bool:
        """Experts that the source stacks in one tensor are quantized one by one."""
        below = name.rpartition(".")[0] + "."
        return len(source.info(name).shape) == 3 and any(m.startswith(below) for m in self.schemes)


def _spread(items: list[str], count: int) -> list[str]:
    """Return at most `count` items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return items
    step = (len(items) - 1) / max(count - 1, 1)
    return [items[round(i * step)] for i in range(count)]


def _relative_error(decoded: Iterator[tuple[int, torch.Tensor]], original: torch.Tensor) -> float:
    noise = signal = 0.0
    for start, rows in decoded:
        true = original[start : start + len(rows)].double()
        noise += float((rows - true).square_().sum())
        signal += float(true.square_().sum())
    return noise / signal if signal else noise
