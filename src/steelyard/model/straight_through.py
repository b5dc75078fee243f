"""Quantized inputs that gradients pass through.

compressed-tensors rounds inputs without a gradient. Here the values are the same, and the gradient
with respect to an input is that with respect to its rounded value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch.nn import Module

__all__ = ["straight_through_inputs"]


@contextlib.contextmanager
def straight_through_inputs(root: Module) -> Iterator[None]:
    """Let gradients pass through the quantized inputs of all modules of `root`.

    Their weights must be decoded: compressed-tensors' own forward, which would round them, is off.
    """
    changed: list[tuple[Any, bool, Any]] = []
    try:
        for module in root.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if (
                scheme is None
                or scheme.input_activations is None
                or "weight" not in vars(module)["_parameters"]
            ):
                continue
            before = getattr(module, "quantization_enabled", True)
            handle = module.register_forward_pre_hook(_round_input)
            changed.append((module, before, handle))
            module.quantization_enabled = False  # type: ignore[assignment]
        yield
    finally:
        for module, before, handle in changed:
            module.quantization_enabled = before
            handle.remove()


def _round_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    value, *others = args
    rounded: torch.Tensor = _RoundedInput.apply(value, module)  # type: ignore[no-untyped-call]
    return rounded, *others


class _RoundedInput(torch.autograd.Function):
    """The rounded value, with the gradient of the value."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, module: Any) -> torch.Tensor:
        args = module.quantization_scheme.input_activations
        return torch.as_tensor(forward_quantize(module, value, "input", args))

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return gradients[0], None
