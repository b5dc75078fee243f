"""The contents of a checkpoint, module by module, quantized or not.

Names, types, shapes and sizes come from headers; of the values, only scales are read. A checkpoint
whose files contradict each other is refused. If its config cannot be used, the tensors are shown as
stored, with the reason among the problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.base import QUANTIZATION_METHOD

from steelyard.checkpoint.config_file import read_config
from steelyard.checkpoint.shards import Shards, TensorInfo
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import CheckpointError
from steelyard.formats import describe_args, format_of
from steelyard.formats.scale_codes import is_exponents, stored_scale_values
from steelyard.formats.tensor_names import WEIGHT, holds_values, is_parameter, is_scale

__all__ = ["Contents", "ModuleContents", "ScaleStatistics", "read_contents"]

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}


@dataclass(frozen=True)
class ScaleStatistics:
    """The values of one tensor of scales, as stored.

    minimum, median, maximum: of those that are finite; None where there is none
    """

    count: int
    minimum: float | None
    median: float | None
    maximum: float | None
    non_finite: int
    zero: int
    negative: int


@dataclass(frozen=True)
class ModuleContents:
    """The tensors of one module.

    kind:    type of the stored weight, such as "int4 group 128" or "bf16"
    shape:   of the weight before it was packed; None where it is unknown
    weights: number of weights and biases; None where it is unknown
    """

    name: str
    kind: str
    format: str | None
    shape: tuple[int, ...] | None
    weights: int | None
    tensors: dict[str, TensorInfo]
    scales: dict[str, ScaleStatistics] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def is_quantized(self) -> bool:
        return self.format is not None


@dataclass
class Contents:
    """A checkpoint's modules, and a few facts from its config."""

    folder: Path
    files: int
    model_type: str | None = None
    quantization: str | None = None
    modules: list[ModuleContents] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(module.nbytes for module in self.modules)

    @property
    def weights(self) -> int | None:
        """Number of weights in the checkpoint; None where that of a module is unknown."""
        counts = [module.weights for module in self.modules]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.nbytes / self.weights if self.weights else None


def read_contents(
    folder: str | Path,
    keep: Callable[[str], bool] = lambda name: True,
    scales: bool = True,
    advance: Callable[[int], None] = lambda amount: None,
) -> Contents:
    """Read the headers of a checkpoint, and its scales.

    keep:    returns whether the module with this name is wanted
    scales:  False reads only headers
    advance: called with the number of bytes of scales read
    """
    with Shards(folder) as shards:
        found = Contents(shards.folder, len(shards.files))
        config: dict[str, Any] = {}
        try:
            config = read_config(shards.folder)
        except CheckpointError as error:
            found.problems.append(f"{error}; types and sizes are those of the files")
        found.model_type = _text(config.get("model_type"))
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict):
            found.quantization = _text(quantization.get("quant_method")) or "unknown"
        written = None
        if found.quantization == QUANTIZATION_METHOD:
            try:
                written = WrittenCheckpoint(shards.folder, None)
            except CheckpointError as error:
                found.problems.append(" ".join(str(error).split()))
        for name, tensors in _by_module(shards).items():
            if keep(name):
                found.modules.append(
                    _module(name, tensors, shards, written, found.quantization, scales, advance)
                )
        if written is not None:
            written.shards.close()
    return found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.isprintable() else None


def _by_module(shards: Shards) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each module by local name; a parameter without a module is its own."""
    found: dict[str, dict[str, TensorInfo]] = {}
    weighed = {n.rpartition(".")[0] for n in shards if holds_values(n.rpartition(".")[2])}
    for name in shards:
        module, _, local = name.rpartition(".")
        owner = module if module in weighed or is_parameter(local) else name
        found.setdefault(owner or name, {})[local] = shards.info(name)
    return found


def _module(
    name: str,
    tensors: dict[str, TensorInfo],
    shards: Shards,
    written: WrittenCheckpoint | None,
    method: str | None,
    scales: bool,
    advance: Callable[[int], None],
) -> ModuleContents:
    scheme = written.schemes.get(name) if written is not None else None
    main = tensors.get(WEIGHT) or max(tensors.values(), key=lambda info: info.nbytes)
    shape: tuple[int, ...] | None = main.shape
    kind, format = _DTYPES.get(main.dtype, str(main.dtype).removeprefix("torch.")), None
    others = [info for local, info in tensors.items() if info is not main and local == "bias"]
    if written is not None and scheme is not None:
        shape = _original_shape(written, name)
        kind = describe_args(scheme.weights) if scheme.weights is not None else kind
        with suppress(ValueError):  # an unknown format
            format = format_of(scheme)
    elif method not in (None, QUANTIZATION_METHOD) and not main.dtype.is_floating_point:
        shape = None  # packed in an unknown way
    weights = None
    if shape is not None:
        weights = math.prod(shape) + sum(math.prod(info.shape) for info in others)
    statistics = {}
    for local, info in tensors.items():
        usable = info.dtype.is_floating_point or is_exponents(info.dtype)
        if scales and is_scale(local) and usable:
            statistics[local] = _statistics(shards.read(info.name))
            advance(info.nbytes)
    return ModuleContents(name, kind, format, shape, weights, tensors, statistics)


def _original_shape(written: WrittenCheckpoint, module: str) -> tuple[int, ...] | None:
    try:
        shape = written.shape(module)
    except (CheckpointError, ValueError):
        return None
    return shape if all(0 <= size < 1 << 40 for size in shape) else None


def _statistics(stored: torch.Tensor) -> ScaleStatistics:
    value = stored_scale_values(stored).flatten()
    finite = value[torch.isfinite(value)]
    some = finite.numel() > 0
    return ScaleStatistics(
        count=value.numel(),
        minimum=float(finite.min()) if some else None,
        median=float(finite.median()) if some else None,
        maximum=float(finite.max()) if some else None,
        non_finite=value.numel() - finite.numel(),
        zero=int((value == 0).sum()),
        negative=int((finite < 0).sum()),
    )
