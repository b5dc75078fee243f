"""A block that runs with weights which are being tuned, and the gradients of its error by them.

The error of a token is the squared difference of the block's output from that of the unquantized
model, over the mean square of the latter: the next block normalizes each token, and a few tokens
that are a thousand times as large as the others would count alone. Errors are summed over all
tokens but padding. Each rank runs its own batches. Their gradients are rounded to
multiples of one unit per weight matrix, so that fp64 adds them without rounding: any order, and any
number of ranks, gives the same sum.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from steelyard.algorithms.block import Block
from steelyard.model.precision import product_dtype
from steelyard.model.stand_ins import standing_in
from steelyard.observers.padding import real_tokens, without_padding

__all__ = ["TunedBlock"]

_PRECISION, _HEADROOM = 28, 16  # bits below and above the largest of the first gradients


class TunedBlock:
    """Runs batches of all ranks with given weights.

    weights: by module name, what its forward multiplies with
    """

    def __init__(self, block: Block, names: Collection[str]) -> None:
        self.block = block
        self.names = list(names)
        self.weights: dict[str, torch.Tensor] = {}
        self._units: dict[str, float] = {}
        self._own = {number: index for index, number in enumerate(block.numbers)}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Replace the forward of every quantized Linear while it is entered."""
        forwards: dict[Module, Callable[..., Any]] = {
            module: self._forward(name, module)
            for name, module in self.block.within.items()
            if isinstance(module, Linear) and hasattr(module, "quantization_scheme")
        }
        with standing_in(forwards):
            yield

    def _forward(self, name: str, module: Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        scheme: Any = module.quantization_scheme
        fixed = None if name in self.names else _fixed(module, scheme.weights)
        wide: dict[torch.dtype, Module] = {}

        def forward(x: torch.Tensor) -> torch.Tensor:
            like = wide.get(x.dtype) or wide.setdefault(x.dtype, _cast(module, x.dtype))
            x = _quantized(like, x, "input", scheme.input_activations)
            weight = self.weights[name] if fixed is None else fixed
            dtype = product_dtype(module, x.dtype)
            bias = None if module.bias is None else module.bias.to(dtype)
            y = linear(x.to(dtype), weight.to(dtype), bias).to(x.dtype)
            return _quantized(like, y, "output", scheme.output_activations)

        return forward

    # -- losses -------------------------------------------------------------------------------

    def _error(self, number: int) -> torch.Tensor:
        index, block = self._own[number], self.block
        expected = block.originals[index][1].float()
        error = token_errors(block.forward(index).float(), expected)
        with without_padding(block.padding[index]):
            return real_tokens(error, "output").sum()

    def losses(self, numbers: Collection[int]) -> list[float]:
        """Return the errors of some batches of the run, by their numbers."""
        mine = [number for number in numbers if number in self._own]

        def loss(number: int) -> float:
            with torch.no_grad():
                return float(self._error(number))

        found = self.block.pool.do((i, partial(loss, n)) for i, n in enumerate(mine))
        every = self.block.ranks.gather(dict(zip(mine, found, strict=True)))
        by_number = {number: each for found in every for number, each in found.items()}
        return [by_number[number] for number in sorted(by_number)]

    # -- gradients ----------------------------------------------------------------------------

    def gradients(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the gradient of the error of some batches of the run by each weight, fp64."""
        if not self._units:
            self._units = self._first_units(numbers)
        sums: dict[str, torch.Tensor] = {}
        for gradients in self._each(numbers):
            for name, gradient in gradients.items():
                if gradient is not None:
                    rounded = _rounded(gradient, self._units[name])
                    sums[name] = sums[name].add_(rounded) if name in sums else rounded
        if self.block.ranks.count == 1:
            return sums
        joined = ((name, self._joined(sums.get(name))) for name in self.names)
        return {name: total for name, total in joined if total is not None}

    def _joined(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sum over all ranks; None if none has a value."""
        parts = self.block.ranks.gather(value)
        found = [part for part in parts if part is not None]
        return torch.stack(found).sum(0).to(self.block.device) if found else None

    def _each(self, numbers: Sequence[int]) -> Iterator[dict[str, torch.Tensor | None]]:
        """Yield the gradients of each batch of this rank."""
        mine = [number for number in numbers if number in self._own]
        leaves = [self.weights[name].requires_grad_(True) for name in self.names]

        def gradients(number: int) -> tuple[torch.Tensor | None, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(self._error(number), leaves, allow_unused=True)

        calls = ((i, partial(gradients, number)) for i, number in enumerate(mine))
        with contextlib.closing(self.block.pool.begin(calls)) as found:
            for each in found:
                yield dict(zip(self.names, each, strict=True))

    def _first_units(self, numbers: Sequence[int]) -> dict[str, float]:
        """Return the unit of each matrix: a power of two, from the largest of its gradients."""
        largest: dict[str, float] = {}
        for gradients in self._each(numbers):
            for name, gradient in gradients.items():
                if gradient is not None:
                    largest[name] = max(largest.get(name, 0.0), float(gradient.abs().max()))
        for each in self.block.ranks.gather(largest):
            largest |= {name: max(value, largest.get(name, 0.0)) for name, value in each.items()}
        rest = max(largest.values(), default=0.0)  # for experts without tokens in these batches
        sizes = {name: math.frexp(largest.get(name, rest))[1] for name in self.names}
        return {name: 2.0 ** (size - _PRECISION) for name, size in sizes.items()}


def token_errors(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each token, (..., 1)."""
    size = expected.square().mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (output - expected).square().mean(-1, keepdim=True) / size


def _rounded(gradient: torch.Tensor, unit: float) -> torch.Tensor:
    """Return the nearest multiples of a unit, fp64."""
    limit = unit * 2.0 ** (_PRECISION + _HEADROOM)
    shift = 1.5 * 2.0**52 * unit  # fp64 numbers of its size are multiples of the unit
    return gradient.double().clamp_(-limit, limit).add_(shift).sub_(shift)


def _quantized(module: Module, x: torch.Tensor, base_name: str, args: Any) -> torch.Tensor:
    """Return an activation as the server quantizes it, with the gradient of the identity."""
    if args is None:
        return x
    with torch.no_grad():
        off: torch.Tensor = forward_quantize(module, x, base_name, args) - x
    return x + off


def _fixed(module: Any, args: Any) -> torch.Tensor:
    """Return the weight of a module that another modifier quantizes."""
    weight: torch.Tensor = module.weight.data
    if args is not None:
        weight = forward_quantize(module, weight, "weight", args)
    return weight


def _cast(module: Module, dtype: torch.dtype) -> Module:
    """Return a copy of a module whose activation scales have the type that it computes in."""
    made, cast = copy.copy(module), {}
    for name, parameter in module._parameters.items():
        if parameter is not None and name.startswith(("input_", "output_")):
            narrow = parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize
            value = parameter.data.to(dtype) if narrow else parameter.data
            cast[name] = Parameter(value, requires_grad=False)
    made.__dict__["_parameters"] = cast
    return made
