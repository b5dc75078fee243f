"""A hook point for the inputs of all experts of a layer.

A router sends each token to a few experts, with a weight for each expert's output, so experts get
different tokens and in some batches none. A module that routes calls a `RoutingPoint` once per
batch, with the inputs of all its experts, before any of them runs. Experts are observed there, not
at each Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import Linear, Module

__all__ = ["RoutedInputs", "RoutingPoint", "routing_points"]


class RoutedInputs:
    """Inputs of the experts of a layer in one batch, computed lazily.

    shape:    of the routed tensor
    tokens:   expert -> its inputs, (tokens, features), without padding; None if it gets none
    weights:  expert -> (tokens,), the factors on its output; None for 1
    everyone: expert -> its inputs if it got all tokens of the batch, without padding; None where
              ranges need not cover them
    """

    def __init__(
        self,
        shape: torch.Size,
        tokens: Callable[[int], torch.Tensor | None],
        weights: Callable[[int], torch.Tensor | None],
        everyone: Callable[[int], torch.Tensor] | None,
    ) -> None:
        self.shape = shape
        self.tokens = tokens
        self.weights = weights
        self.everyone = everyone


class RoutingPoint(Module):
    """Called with the `RoutedInputs` of each batch, for forward hooks to observe.

    linears: per expert, the layers that get its input
    """

    linears: tuple[tuple[Linear, ...], ...]

    def __init__(self, linears: Sequence[tuple[Linear, ...]]) -> None:
        super().__init__()
        self.__dict__["linears"] = tuple(linears)  # not as children: they already are elsewhere

    def forward(self, inputs: RoutedInputs) -> None:
        """Do nothing."""


def routing_points(root: Module) -> Iterator[RoutingPoint]:
    """Yield the points within a module, in call order."""
    for module in root.modules():
        yield from module.__dict__.get("routing_points", ())
