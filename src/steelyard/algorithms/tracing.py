"""Traces one batch through a block: the weighted modules in call order, with input and output."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Embedding, Module

from steelyard.algorithms.block import Block

__all__ = ["TracedCall", "numbers_of", "pattern_of", "reads", "trace"]

_NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class TracedCall:
    """The first call of a module that holds a weight.

    shape: of the weight: (channels,) of a norm, (out, in) of a Linear or a router
    """

    name: str
    shape: torch.Size
    input: torch.Tensor
    output: torch.Tensor


def trace(block: Block) -> dict[str, TracedCall]:
    """Run this rank's first batch; return the calls of modules with a weight, in order."""
    calls: dict[str, TracedCall] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in block.within.items():
            weight = module._parameters.get("weight")
            if weight is None or weight.ndim > 2 or isinstance(module, Embedding):
                continue

            def seen(
                module: Module, args: Any, kwargs: dict[str, Any], output: Any, name: str = name
            ) -> None:
                given = [*args, *kwargs.values()]
                tensors = [each for each in given if isinstance(each, torch.Tensor)]
                made = output[0] if isinstance(output, tuple) else output
                if tensors and name not in calls and isinstance(made, torch.Tensor):
                    shape = torch.Size(module.weight.shape)  # type: ignore[arg-type]
                    calls[name] = TracedCall(name, shape, tensors[0], made)

            hooks.callback(module.register_forward_hook(seen, with_kwargs=True).remove)
        block.forward(0)
    return calls


def reads(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether rows of `x` are those of `y`: the same memory, or some of its tokens."""
    if x.shape[-1] != y.shape[-1] or not x.numel():
        return False
    if x.data_ptr() == y.data_ptr() and x.numel() == y.numel():
        return True
    rows, all_rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    return all(bool((all_rows == row).all(-1).any()) for row in (rows[0], rows[-1]))


def pattern_of(name: str, block: str) -> str:
    """Return the name of a module within its block, with * for the number of an expert.

    >>> pattern_of("model.layers.3.mlp.experts.7.up_proj", "model.layers.3")
    '.mlp.experts.*.up_proj'
    """
    return _NUMBER.sub(".*", name.removeprefix(block))


def numbers_of(name: str, block: str) -> tuple[str, ...]:
    """Return the numbers in the name of a module within its block, such as that of an expert."""
    return tuple(_NUMBER.findall(name.removeprefix(block)))
