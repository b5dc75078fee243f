"""The stored tensors of a quantized model that can be tuned: scales, norm gains and biases.

Codes are frozen, so a weight is linear in its scales. Each tensor has a change d in fp32, and is
stored as the nearest value of its type:

    scale    s (1 + d)       of integers and 8-bit floats, and E4M3 scales of NVFP4
    plain    p + d rms(p)    norm gains and biases

Rounding to the stored type is straight-through: the gradient with respect to d is that without it.
A scale never becomes zero, and keeps its sign.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.match import is_match
from torch.nn import Linear, Module, Parameter

from steelyard.checkpoint import Shards
from steelyard.checkpoint.decoded import DecodedView
from steelyard.formats.tensor_names import GROUP_INDEX, SCALE
from steelyard.kernels.scale_blocks import block_of
from steelyard.model.layer_gradients import Wanted
from steelyard.model.source import Source

__all__ = ["MOST", "Tunable", "Tunables"]

MOST = 0.5  # largest |d|


@dataclass
class Tunable:
    """One stored tensor.

    key:   its name in the files
    start: its stored values, fp32
    dtype: its stored type
    block: rows and columns of a weight that share a scale; None for a plain tensor
    """

    key: str
    start: torch.Tensor
    dtype: torch.dtype
    block: tuple[int, int] | None
    change: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.change = torch.zeros_like(self.start)

    @cached_property
    def _size(self) -> torch.Tensor:
        """What d = 1 adds to a plain tensor: its root mean square."""
        return self.start.square().mean().sqrt()

    def stored(self) -> torch.Tensor:
        """Return the changed tensor in its stored type."""
        scaled = self.start * (1 + self.change)
        wide = self.start + self.change * self._size if self.block is None else scaled
        largest = torch.finfo(self.dtype).max
        near = wide.clamp(-largest, largest).to(self.dtype)
        if self.block is None:
            return near
        return torch.where(near.float() == 0, self.start, near.float()).to(self.dtype)

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter of the model with the change.

        parameter: as the files have it, decoded; fp32
        """
        new = self.stored().float()
        if self.block is None:
            return new
        factor = torch.where(self.start == 0, 1.0, new / self.start)
        return parameter * expanded(factor, self.block, parameter.shape)

    def gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient with respect to d, given that with respect to the parameter."""
        if self.block is None:
            return gradient * self._size
        return block_sums(gradient * parameter, self.block).reshape(self.start.shape)


def expanded(values: torch.Tensor, block: tuple[int, int], shape: Sequence[int]) -> torch.Tensor:
    """Return (out, in) with the value of its block at each place.

    values: (blocks of rows, blocks of columns)
    """
    rows = values.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def block_sums(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the sum over each block of (out, in); the last ones may be partial."""
    height, width = block
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % width, 0, -rows % height))
    return padded.reshape(-(-rows // height), height, -1, width).sum((1, 3))


class Tunables:
    """The tunable tensors of a quantized model.

    source:  the quantized model, opened as it is served
    targets: modules whose tensors are tuned, by name or class; `ignore` the same
    fixed:   reason -> modules whose scales cannot be tuned
    """

    def __init__(self, source: Source, targets: Sequence[str], ignore: Sequence[str]) -> None:
        self.fixed: dict[str, list[str]] = {}
        self._places: dict[Module, dict[str, Tunable]] = {}
        view: Any = source.shards
        assert isinstance(view, DecodedView)
        with Shards(view.folder) as files:
            for name, module in source.model.named_modules():
                if name and is_match(name, module, list(targets), list(ignore)):
                    found = dict(self._of_module(source, view, files, name, module))
                    if found:
                        self._places[module] = found

    def __iter__(self) -> Iterator[Tunable]:
        for found in self._places.values():
            yield from found.values()

    def _of_module(
        self, source: Source, view: DecodedView, files: Shards, name: str, module: Module
    ) -> Iterator[tuple[str, Tunable]]:
        """Yield the tunable tensors of a module, each with the parameter that it changes."""
        key = source.module_key(name) if "weight" in module._parameters else ""
        scheme = view.schemes.get(key)
        if scheme is not None and scheme.weights is not None:
            scale = f"{key}.{SCALE}"
            if reason := _fixed(module, scheme.weights, files, key):
                self.fixed.setdefault(reason, []).append(name)
            else:
                weight: Any = module._parameters["weight"]
                block = block_of(scheme.weights, *weight.shape)
                yield "weight", _tunable(files, scale, block)
        for leaf, parameter in module._parameters.items():
            gain = leaf == "weight" and "norm" in type(module).__name__.lower()
            if parameter is None or parameter.ndim != 1 or not (gain or leaf == "bias"):
                continue
            plain = source.keys.get(f"{name}.{leaf}", "")
            if plain in files and files.info(plain).dtype.is_floating_point:
                yield leaf, _tunable(files, plain, None)

    @contextlib.contextmanager
    def applied(self, root: Module, without: Sequence[Module]) -> Iterator[list[Wanted]]:
        """Compute with the changed tensors inside of `root`; yield their parameters."""
        excluded = {module for each in without for module in each.modules()}
        before: list[tuple[Module, str, Parameter]] = []
        wanted: list[Wanted] = []
        try:
            for module in root.modules():
                if module in excluded:
                    continue
                for leaf, tunable in self._places.get(module, {}).items():
                    parameter = module._parameters[leaf]
                    if parameter is None or parameter.device.type == "meta":
                        continue
                    before.append((module, leaf, parameter))
                    changed = Parameter(tunable.value(parameter.data))
                    module._parameters[leaf] = changed
                    wanted.append(Wanted(tunable.key, changed, _reducing(tunable, parameter.data)))
            yield wanted
        finally:
            for module, leaf, parameter in before:
                module._parameters[leaf] = parameter


def _reducing(tunable: Tunable, parameter: torch.Tensor) -> Any:
    return lambda gradient: tunable.gradient(parameter, gradient)


def _tunable(files: Shards, key: str, block: tuple[int, int] | None) -> Tunable:
    value = files.read(key)
    return Tunable(key, value.float(), value.dtype, block)


def _fixed(module: Module, args: QuantizationArgs, files: Shards, key: str) -> str | None:
    """Return why the scales of a quantized module cannot be tuned."""
    if not isinstance(module, Linear):
        return f"{type(module).__name__} is not a Linear"
    if args.strategy == "tensor":
        return "one scale for the whole tensor, which fused layers share"
    if f"{key}.{GROUP_INDEX}" in files:
        return "groups of columns that are not adjacent"
    if not files.info(f"{key}.{SCALE}").dtype.is_floating_point:
        return "scales are powers of two"
    return None
