"""Does a written checkpoint hold what its own config promises?

A server loads a checkpoint that lacks a scale without a word and answers with noise, so "it loads"
proves nothing. Here the files are opened again, from nothing but config.json, and held against the
scheme, the source, and the errors that were reported while quantizing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.utils.match import match_name

from steelyard.checkpoint.layout import (
    TensorSpec,
    compressor_of,
    expected_attention_tensors,
    expected_tensors,
    format_of,
)
from steelyard.checkpoint.shards import Shards
from steelyard.errors import CheckpointError
from steelyard.kernels.rounding import quantized_range

__all__ = ["CheckpointInvalid", "validate_checkpoint"]

_PARAMETER = re.compile(r"(weight|input|output)_(packed|scale|zero_point|global_scale|shape|g_idx)")
_CACHE_PARAMETER = re.compile(r"[qkv]_(scale|zero_point)")
_EMBEDDING = re.compile(r"embed|wte|wpe")
_TOLERANCE = 0.01  # of a reported error, relative


class CheckpointInvalid(CheckpointError):
    """A written checkpoint that must not be served."""


def validate_checkpoint(
    folder: str | Path,
    *,
    source: Shards | None = None,
    reported: Mapping[str, float] | None = None,
    samples: int = 8,
    fused: Iterable[tuple[str, ...]] = (),
    allow_negative: bool = False,
    same_bytes: bool = True,
) -> list[str]:
    """Return the problems of a checkpoint, one line each; an empty list means that it is good.

    source:         what was quantized; all that was not must still be there
    reported:       module -> relative squared error of its weight, held against the files
    samples:        how many weights are decoded, evenly spread over the model
    fused:          modules that the server merges, which must share global and per-tensor scales
    allow_negative: symmetric integer weights may have negative scales
    same_bytes:     compare unquantized tensors byte for byte, not by type and shape alone
    """
    try:
        checkpoint = _Checkpoint(Path(folder), source)
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


class _Checkpoint:
    """A checkpoint's tensors by module, and the scheme of each module that has one."""

    def __init__(self, folder: Path, source: Shards | None) -> None:
        self.config, self.quantization = _read_config(folder)
        self.shards = Shards(folder)
        self.source = source
        self.broken: set[str] = set()  # modules that cannot be decoded, found by `structure`
        self.tensors: dict[str, set[str]] = {}
        for name in self.shards:
            module, _, local = name.rpartition(".")
            self.tensors.setdefault(module, set()).add(local)
        self.schemes = {
            module: scheme
            for module in self.tensors
            if (scheme := self._scheme(module)) is not None and self._can_be_quantized(module)
        }

    def _scheme(self, module: str) -> QuantizationScheme | None:
        """The scheme of a module: by its name, else by a pattern, else by its likely class."""
        if any(match_name(module, entry) for entry in self.quantization.ignore or ()):
            return None
        class_name = "Embedding" if _EMBEDDING.search(module.rpartition(".")[2]) else "Linear"
        groups = self.quantization.config_groups.values()
        for scheme in sorted(groups, key=lambda s: module not in s.targets):
            if any(match_name(module, target) for target in scheme.targets):
                return self._with_format(scheme)
        for scheme in groups:
            if class_name in scheme.targets:
                return self._with_format(scheme)
        return None

    def _with_format(self, scheme: QuantizationScheme) -> QuantizationScheme:
        """A scheme without a format of its own has that of the whole checkpoint."""
        overall = self.quantization.format
        if scheme.format is not None or overall in ("dense", "fakequant", "mixed-precision"):
            return scheme
        return scheme.model_copy(update={"format": overall})

    def _can_be_quantized(self, module: str) -> bool:
        if any(_PARAMETER.fullmatch(local) for local in self.tensors[module]):
            return True
        plain = f"{module}.weight"
        return plain in self.shards and len(self.shards.info(plain).shape) == 2

    # -- what there is ----------------------------------------------------------------------

    def structure(self) -> Iterator[str]:
        """Every tensor that a scheme needs, in its type and shape, and none besides."""
        if not self.schemes and self.quantization.kv_cache_scheme is None:
            yield f"{self.shards.folder} has a quantization_config but no quantized module"
        for module, locals_ in self.tensors.items():
            found = {local for local in locals_ if _PARAMETER.fullmatch(local)}
            scheme = self.schemes.get(module)
            if scheme is None:
                for local in sorted(found):
                    yield f"{module}.{local} is there, but the config does not quantize {module}"
                continue
            try:
                expected = expected_tensors(scheme, self._shape(module), self._dtype(module))
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

    def _shape(self, module: str) -> tuple[int, int]:
        """The shape that the weight had, from the source or else from what is stored."""
        plain, packed, scale = (
            f"{module}.{s}" for s in ("weight", "weight_packed", "weight_scale")
        )
        args = self.schemes[module].weights
        if self.source is not None and plain in self.source:
            rows, columns = self.source.info(plain).shape
        elif plain in self.shards:
            rows, columns = self.shards.info(plain).shape
        elif f"{module}.weight_shape" in self.shards:
            rows, columns = self.shards.read(f"{module}.weight_shape").tolist()
        elif packed in self.shards and args is not None and args.type == "float":
            rows, width = self.shards.info(packed).shape
            columns = width * 8 // args.num_bits
        elif scale in self.shards and args is not None and args.group_size:
            rows, groups = self.shards.info(scale).shape
            columns = groups * args.group_size
        else:
            raise CheckpointError("there is no weight, nor anything that tells its shape")
        return rows, columns

    def _dtype(self, module: str) -> torch.dtype:
        """The type that the weight had."""
        plain, scale = f"{module}.weight", f"{module}.weight_scale"
        if self.source is not None and plain in self.source:
            return self.source.info(plain).dtype
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        dtype = getattr(torch, str(named).removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
        stored = self.shards.info(scale).dtype if scale in self.shards else torch.uint8
        return stored if stored.itemsize > 1 else torch.bfloat16  # one byte is a code of the format

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
                match = _PARAMETER.fullmatch(local)
                args = parts[match[1]] if match else None
                if args is not None:
                    signed = args is scheme.weights and args.type == "int" and args.symmetric
                    name = f"{module}.{local}"
                    yield from self._check_values(name, args, allow_negative and signed)
            if "weight_shape" in self.tensors[module] and module not in self.broken:
                stored = tuple(self.shards.read(f"{module}.weight_shape").tolist())
                if stored != self._shape(module):
                    yield f"{module}.weight_shape says {stored}; expected {self._shape(module)}"

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
        """Scales of a quantized key and value cache."""
        args = self.quantization.kv_cache_scheme
        found = {
            module: names
            for module, locals_ in self.tensors.items()
            if (names := {local for local in locals_ if _CACHE_PARAMETER.fullmatch(local)})
        }
        if args is None:
            return
        if not found and args.dynamic is not True:
            yield "k_scale and v_scale are missing, but the config has a static kv_cache_scheme"
        text = self.config.get("text_config", self.config)
        heads = text.get("num_key_value_heads", text.get("num_attention_heads", 1))
        for module, names in found.items():
            yield from self._compare(
                module, expected_attention_tensors(args, self._dtype(module), heads)
            )
            for local in sorted(names):
                yield from self._check_values(f"{module}.{local}", args, signed=False)

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
        for module in _spread(known, samples):
            original = source.read(f"{module}.weight").float()
            try:
                error = _relative_error(self._decode(module), original)
            except (RuntimeError, ValueError, AssertionError, KeyError) as failure:
                yield f"{module}.weight cannot be decoded: {failure}"
                continue
            limit = (reported[module] if reported else float("inf")) * (1 + _TOLERANCE) + 1e-12
            if not error <= limit:  # also where it is NaN
                yield f"{module}.weight decodes with a relative error of {error:.4g}; reported " + (
                    f"{reported[module]:.4g}" if reported else "none"
                )

    def _decode(self, module: str) -> torch.Tensor:
        scheme = self.schemes[module]
        names = [local for local in self.tensors[module] if _PARAMETER.fullmatch(local)]
        if "weight" in self.tensors[module]:
            names.append("weight")
        state = {local: self.shards.read(f"{module}.{local}") for local in names}
        scale = state["weight_scale"]
        if scale.dtype.itemsize > 1:  # else the product is rounded to bf16, which 8 bits notice
            state["weight_scale"] = scale.float()
        decoded = compressor_of(format_of(scheme)).decompress(state, scheme)
        return torch.as_tensor(decoded["weight"]).float()

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
            elif same_bytes and not torch.equal(
                source.read(name).reshape(-1).view(torch.uint8),
                self.shards.read(name).reshape(-1).view(torch.uint8),
            ):
                yield f"{name} is not quantized, but its values differ from the source"

    def _was_split(self, name: str, source: Shards) -> bool:
        """Experts that the source stacks in one tensor are quantized one by one."""
        below = name.rpartition(".")[0] + "."
        return len(source.info(name).shape) == 3 and any(m.startswith(below) for m in self.schemes)


def _read_config(folder: Path) -> tuple[dict[str, Any], QuantizationConfig]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        return config, QuantizationConfig.model_validate(config["quantization_config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no usable quantization_config: {error!r}") from error


def _spread(items: list[str], count: int) -> list[str]:
    """Return at most `count` items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return items
    step = (len(items) - 1) / max(count - 1, 1)
    return [items[round(i * step)] for i in range(count)]


def _relative_error(decoded: torch.Tensor, original: torch.Tensor) -> float:
    noise = (decoded - original).square_().sum(dtype=torch.float64)
    signal = original.square().sum(dtype=torch.float64)
    return float(noise / signal) if signal else float(noise)
