"""A checkpoint's tensors as a quantizer needs them: 2-D weights in a float type.

Two kinds of source store something else. FP8 checkpoints hold blocks of codes with a
`weight_scale_inv` each; here they read as the type that the config names. Mixture-of-experts models
may stack all experts in one tensor; here each expert has weights of its own, under the names that
servers know. A head that is tied to the embedding gets a name of its own when it is untied. Tensors
are converted when they are read, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.config_file import (
    named_dtype,
    read_config,
    text_config,
    untied_config,
)
from steelyard.checkpoint.expert_stacks import PAIRS, Stack, is_turned, parts_of_stack
from steelyard.checkpoint.shards import PIECE, Shards, TensorInfo
from steelyard.errors import CheckpointError
from steelyard.foreign import show
from steelyard.kernels.scale_blocks import blocks_in

__all__ = ["CheckpointView", "Stack"]

_SCALE = "_scale_inv"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class CheckpointView(Shards):
    """`Shards` whose FP8 weights read as floats, and whose stacked experts read one by one.

    config:    content of config.json
    stacks:    the split tensors; `restack` undoes that for one
    restacked: those restacked
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.config = read_config(self.folder)
        self.stacks: list[Stack] = []
        self.restacked: list[Stack] = []
        self._experts: dict[str, TensorInfo] = {}  # tensors of experts that are stored in a stack
        self._made: dict[str, Callable[[], torch.Tensor]] = {}
        self._last: tuple[str, torch.Tensor] | None = None  # the tensor that rows were read from
        self._stored = dict(self._infos)  # as in the files
        quantization = self.config.get("quantization_config")
        if quantization is not None:
            self._decode(quantization)
        self._cut_stacks()

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        return text_config(self.config)

    def info(self, name: str) -> TensorInfo:
        expert = None if name in self._infos else self._experts.get(name)
        return super().info(name) if expert is None else expert

    def read(self, name: str) -> torch.Tensor:
        make = self._made.get(name)
        return super().read(name) if make is None else make()

    def mapped(self, name: str) -> torch.Tensor:
        return self.read(name) if name in self._made else super().mapped(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._made:
            return super().read_rows(name, start, stop)
        if self._last is None or self._last[0] != name:  # converted as a whole, so only once
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

    def untie(self, name: str, other: str) -> None:
        """Give a tied tensor a name of its own, under which it reads as `other`."""
        if name not in self._infos:
            self._infos[name] = replace(self._infos[other], name=name)
            if other in self._made:
                self._made[name] = self._made[other]
        self.config = untied_config(self.config)

    def rewrite(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make a tensor read as `change` of it, which keeps its dtype and shape."""
        read = self._made.get(name) or partial(super().read, name)
        self._made[name] = lambda: change(read()).contiguous()
        self._last = None

    # -- FP8 in blocks ------------------------------------------------------------------------

    def _decode(self, quantization: dict[str, Any]) -> None:
        """Decode quantized weights to floats when they are read."""
        method = quantization.get("quant_method")
        block = _block(quantization.get("weight_block_size"))
        if method != "fp8" or block is None:
            raise CheckpointError(
                f"{self.folder} is quantized already (quant_method {show(method)}); pass the "
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
            ending = next((e for e in PAIRS if name.endswith(f".{e}")), None)
            if ending is None:
                continue
            other = self._infos.get(name.removesuffix(ending) + PAIRS[ending])
            if other is None or not len(info.shape) == 3 == len(other.shape):
                continue
            turned = is_turned(info.shape, other.shape, hidden)
            if turned is None or not info.shape[0] == other.shape[0] > 0:
                continue
            biased = f"{name}_bias" in self._infos  # then gate and up are interleaved: gpt-oss
            cut[name] = self._cut(info, turned, biased)
            cut[other.name] = self._cut(other, turned)
            for each in (f"{name}_bias", f"{other.name}_bias") if biased else ():
                if each in self._infos:
                    cut[each] = self._cut(self._infos[each], turned, biased)
        if not cut:
            return
        self.stacks = [Stack(name, tuple(experts)) for name, experts in cut.items()]
        self._experts = {name: info for experts in cut.values() for name, info in experts.items()}
        self._replace_names(cut)

    def _cut(self, info: TensorInfo, turned: bool, in_turns: bool = False) -> dict[str, TensorInfo]:
        """Return the location of each expert's tensors; those that are no slice are made when read.

        turned:   the weights are stored as (in, out)
        in_turns: gate and up are interleaved, column by column
        """
        count, *shape = info.shape
        size = info.nbytes // count
        found = {}
        for expert, names in enumerate(parts_of_stack(info.name, count)):
            slab = replace(
                info, shape=tuple(shape), nbytes=size, offset=info.offset + expert * size
            )
            for part, name in enumerate(names):
                nbytes = size // len(names)
                outputs = (shape[-1] if turned else shape[0]) // len(names)
                rows = slice(part * outputs, (part + 1) * outputs)
                if in_turns and len(names) > 1:
                    rows = slice(part, None, len(names))
                if turned or in_turns:
                    self._made[name] = partial(self._rows, slab, rows, turned)
                inputs = shape[:-1] if turned else shape[1:]
                found[name] = replace(
                    slab,
                    name=name,
                    shape=(outputs, *inputs),
                    nbytes=nbytes,
                    offset=slab.offset + part * nbytes,
                )
        return found

    def _rows(self, slab: TensorInfo, rows: slice, turned: bool) -> torch.Tensor:
        """Return some outputs of an expert, as (out, in)."""
        whole = self.read_stored(slab)
        return (whole.t() if turned else whole)[rows].contiguous()

    def restack(self, stack: Stack) -> None:
        """Make a stack one tensor again, as stored; `read` still returns each expert's."""
        for name in stack.experts[1:]:
            del self._infos[name]
        self._replace_names({stack.experts[0]: {stack.name: self._stored[stack.name]}})
        self.stacks.remove(stack)
        self.restacked.append(stack)

    def _replace_names(self, new: dict[str, dict[str, TensorInfo]]) -> None:
        pairs = [new.get(name, {name: info}) for name, info in self._infos.items()]
        self._infos = {name: info for pair in pairs for name, info in pair.items()}


def _block(given: Any) -> tuple[int, int] | None:
    """Return a block's height and width; None if `given` is not a pair of sizes."""
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        return None
    height, width = given
    if not all(isinstance(size, int) and size > 0 for size in given):
        return None
    return height, width
