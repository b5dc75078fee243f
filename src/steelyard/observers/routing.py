"""Where the experts of a layer get their inputs, all at once.

A router sends each token to a few experts. So an expert sees other tokens than its neighbour, in
some batches none, and each with a weight: that of its output in the sum over experts. A module that
routes calls a `RoutingPoint` once for each batch, with the inputs of all its experts, before any
of them runs. Who observes experts looks there, instead of at each Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import Linear, Module

__all__ = ["RoutedInputs", "RoutingPoint", "routing_points"]


class RoutedInputs:
    """Inputs of the experts of a layer in one batch; made when they are asked for.

    shape:    of the tensor that was routed
    tokens:   of an expert: (tokens, features), without padding; None if it gets none
    weights:  of an expert: (tokens,), by which its output is multiplied; None where it is not
    everyone: of an expert: what all tokens of the batch would be there, without padding; None where
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
    """Called with the `RoutedInputs` of each batch; forward hooks on it see them.

    linears: of each expert, the layers that get its input
    """

    linears: tuple[tuple[Linear, ...], ...]

    def __init__(self, linears: Sequence[tuple[Linear, ...]]) -> None:
        super().__init__()
        self.__dict__["linears"] = tuple(linears)  # not its children: they have their own place

    def forward(self, inputs: RoutedInputs) -> None:
        """Do nothing."""


def routing_points(root: Module) -> Iterator[RoutingPoint]:
    """Yield the points within a module, in the order in which they are called."""
    for module in root.modules():
        yield from module.__dict__.get("routing_points", ())
