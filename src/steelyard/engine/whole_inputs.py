"""Shows the input of a stage once for each batch, even if the batch ran in parts.

So a batch that did not fit on the device leaves the statistics of one that did: averages count it
once, and sums add it in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import torch

from steelyard.observers.padding import padding_mask, without_padding
from steelyard.observers.routing import RoutedInputs
from steelyard.observers.token_weights import joined_weights, token_weights

__all__ = ["see_whole"]


def see_whole(see: Callable[[Any], None], parts: Sequence[tuple[Context, Any]]) -> None:
    """Call `see` with the input of a batch; with that of each part if the device cannot hold it.

    parts: of the batch, each with the context that its forward waits in
    """
    if len(parts) > 1:
        inputs = [x for _, x in parts]
        masks = [context.run(padding_mask) for context, _ in parts]
        weights = [context.run(token_weights) for context, _ in parts]
        try:
            whole, mask = _joined(inputs), _joined_mask(masks, inputs)
        except torch.OutOfMemoryError:
            pass
        else:
            parts = [(parts[0][0].copy(), whole)]
            see = _masked(see, mask, weights)
    for context, x in parts:
        context.run(see, x)


def _masked(
    see: Callable[[Any], None],
    mask: torch.Tensor | None,
    weights: Sequence[torch.Tensor | None],
) -> Callable[[Any], None]:
    def masked(x: Any) -> None:
        with without_padding(mask), joined_weights(weights):
            see(x)

    return masked


def _joined(inputs: Sequence[Any]) -> Any:
    if not isinstance(inputs[0], RoutedInputs):
        return torch.cat(list(inputs))
    everyone = None if inputs[0].everyone is None else _each([each.everyone for each in inputs])
    first = inputs[0].shape
    return RoutedInputs(
        torch.Size([sum(each.shape[0] for each in inputs), *first[1:]]),
        _each([each.tokens for each in inputs]),
        _each([each.weights for each in inputs]),
        everyone,
    )


def _each(functions: Sequence[Any]) -> Callable[[int], Any]:
    """Return a function of the expert that joins what the parts have for it."""

    def found(expert: int) -> torch.Tensor | None:
        values = [function(expert) for function in functions]
        some = [value for value in values if value is not None]
        return torch.cat(some) if some else None

    return found


def _joined_mask(
    masks: Sequence[torch.Tensor | None], inputs: Sequence[Any]
) -> torch.Tensor | None:
    """Return the mask of a batch; a part without one has no padding."""
    known = next((mask for mask in masks if mask is not None), None)
    if known is None:
        return None
    length = known.shape[1]

    def of_part(mask: torch.Tensor | None, rows: int) -> torch.Tensor:
        return known.new_ones(rows, length) if mask is None else mask

    sizes = [each.shape[0] if len(each.shape) > 2 else each.shape[0] // length for each in inputs]
    return torch.cat([of_part(mask, rows) for mask, rows in zip(masks, sizes, strict=True)])
