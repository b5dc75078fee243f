"""A checkpoint's tensors as a quantizer needs them: 2-D weights in a float type.

Two kinds of source store something else. FP8 checkpoints hold blocks of codes with a
`weight_scale_inv` each; here they read as the type that the config names. Mixture-of-experts models
may stack all experts in one tensor; here each expert has weights of its own, under the names that
servers know. Tensors are converted when they are read, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.config_file import named_dtype, read_config, text_config
from steelyard.checkpoint.shards import PIECE, Shards, TensorInfo
from steelyard.errors import CheckpointError
from steelyard.foreign import show
from steelyard.kernels.scale_blocks import blocks_in

__all__ = ["CheckpointView", "Stack"]

_SCALE = "_scale_inv"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Stack:
    """Experts that are stored in one tensor.

    experts: names of each expert's weights here
    """

    name: str
    experts: tuple[str, ...]


class CheckpointView(Shards):
    """`Shards` whose FP8 weights read as floats, and whose stacked experts read one by one.

    cut:    False keeps stacked experts stacked
    config: content of config.json
    stacks: the tensors that were split; `restack` undoes that for one
    """

    def __init__(self, folder: str | Path, cut: bool = True) -> None:
        super().__init__(folder)
        self.config = read_config(self.folder)
        self.stacks: list[Stack] = []
        self._made: dict[str, Callable[[], torch.Tensor]] = {}
        self._last: tuple[str, torch.Tensor] | None = None  # the tensor that rows were read from
        self._stored = dict(self._infos)  # as in the files
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            self._decode(quantization)
        if cut:
            self._cut_stacks()

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        return text_config(self.config)

    def read(self, name: str) -> torch.Tensor:
        make = self._made.get(name)
        return super().read(name) if make is None else make()

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._made:
            return super().read_rows(name, start, stop)
        if self._last is None or self._last[0] != name:  # made as a whole, so made once
            self._last = name, self.read(name)
        return self._last[1][start:stop]

    def pieces(self, name: str) -> Iterator[memoryview]:
        make = self._made.get(name)
        if make is None:
            yield from super().pieces(name)
        elif (tensor := make()).nbytes:
            raw = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            for start in range(0, len(raw), PIECE):
                yield raw[start : start + PIECE]

    # -- FP8 in blocks ------------------------------------------------------------------------

    def _decode(self, quantization: dict[str, Any]) -> None:
        """Make quantized weights read as floats."""
        method = quantization.get("quant_method")
        block = _block(quantization.get("weight_block_size"))
        if method != "fp8" or block is None:
            raise CheckpointError(
                f"{self.folder} is quantized already (quant_method {show(method)}); give the "
                "checkpoint that it was made from"
            )
        named = named_dtype(self.config)
        dtype = named if named in _FLOATS else torch.bfloat16
        for name, info in self._stored.items():
            if info.dtype != torch.float8_e4m3fn:
                continue
            scale = self._infos.pop(f"{name}{_SCALE}", None)
            if scale is None:
                raise CheckpointError(
                    f"{name} is FP8, and {name}{_SCALE} is missing; download the checkpoint again"
                )
            wanted = tuple(map(blocks_in, info.shape, block))
            if len(info.shape) != 2 or scale.shape != wanted:
                raise CheckpointError(
                    f"{name}{_SCALE} is {scale.shape} for a weight of {info.shape} in blocks of "
                    f"{block}; expected {wanted}"
                )
            nbytes = torch.Size(info.shape).numel() * dtype.itemsize
            self._infos[name] = replace(info, dtype=dtype, nbytes=nbytes)
            self._made[name] = partial(self._decoded, info, scale, block, dtype)

    def _decoded(
        self, info: TensorInfo, scale: TensorInfo, block: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        codes, factors = self.read_stored(info), self.read_stored(scale).float()
        out = torch.empty(info.shape, dtype=dtype)
        for i, row in enumerate(range(0, info.shape[0], block[0])):  # one row of blocks at a time
            rows = slice(row, row + block[0])
            wide = factors[i].repeat_interleave(block[1])[: info.shape[1]]
            out[rows] = codes[rows].float().mul_(wide)
        return out

    # -- stacked experts ----------------------------------------------------------------------

    def _cut_stacks(self) -> None:
        hidden = self.text_config.get("hidden_size")
        cut: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self._infos.items():
            parent, _, leaf = name.rpartition(".")
            other = self._infos.get(f"{parent}.down_proj")
            if leaf != "gate_up_proj" or other is None or f"{name}_bias" in self._infos:
                continue  # with a bias, gate and up are interleaved, and no name says so
            if len(info.shape) == 3 == len(other.shape) and info.shape[0] == other.shape[0] > 0:
                turned = _is_turned(info.shape, other.shape, hidden)
                if turned is not None:
                    cut[name] = self._cut(info, parent, ("gate_proj", "up_proj"), turned)
                    cut[other.name] = self._cut(other, parent, ("down_proj",), turned)
        if not cut:
            return
        self.stacks = [Stack(name, tuple(experts)) for name, experts in cut.items()]
        self._replace_names(cut)

    def _cut(
        self, info: TensorInfo, parent: str, leaves: tuple[str, ...], turned: bool
    ) -> dict[str, TensorInfo]:
        """Return the place of each expert's weights; transposed ones are made when read."""
        count, first, second = info.shape
        size = info.nbytes // count
        found = {}
        for expert in range(count):
            slab = replace(
                info, shape=(first, second), nbytes=size, offset=info.offset + expert * size
            )
            for part, leaf in enumerate(leaves):
                name = f"{parent}.{expert}.{leaf}.weight"
                if turned:
                    width = second // len(leaves)
                    self._made[name] = partial(self._turned, slab, part * width, width)
                    shape = (width, first)
                else:
                    shape = (first // len(leaves), second)
                nbytes = size // len(leaves)
                found[name] = replace(
                    slab, name=name, shape=shape, nbytes=nbytes, offset=slab.offset + part * nbytes
                )
        return found

    def _turned(self, slab: TensorInfo, start: int, width: int) -> torch.Tensor:
        return self.read_stored(slab)[:, start : start + width].t().contiguous()

    def restack(self, stack: Stack) -> None:
        """Make a stack one tensor again, as it is stored."""
        for name in stack.experts[1:]:
            del self._infos[name]
        for name in stack.experts:
            self._made.pop(name, None)
        self._replace_names({stack.experts[0]: {stack.name: self._stored[stack.name]}})
        self.stacks.remove(stack)

    def _replace_names(self, new: dict[str, dict[str, TensorInfo]]) -> None:
        pairs = [new.get(name, {name: info}) for name, info in self._infos.items()]
        self._infos = {name: info for pair in pairs for name, info in pair.items()}


def _block(given: Any) -> tuple[int, int] | None:
    """Return a block's height and width; None if `given` is no pair of sizes."""
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        return None
    height, width = given
    if not all(isinstance(size, int) and size > 0 for size in given):
        return None
    return height, width


def _is_turned(gate_up: tuple[int, ...], down: tuple[int, ...], hidden: Any) -> bool | None:
    """Whether experts are stored as (in, out); None where the shapes leave it open.

    The output of `down_proj` has the model's width, and its input half the rows of `gate_up_proj`.
    """
    as_linear = down[1] == hidden and gate_up[1:] == (2 * down[2], hidden)
    as_product = down[2] == hidden and gate_up[1:] == (hidden, 2 * down[1])
    return None if as_linear == as_product else as_product
