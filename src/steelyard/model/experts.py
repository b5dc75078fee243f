"""The experts of a layer as Linear layers, one for each expert and projection.

transformers stacks the experts of a layer in 3-D parameters. Recipes, observers and servers work on
Linear layers, so `Experts` replaces such a module and computes the same: it passes the tokens of
each expert through `gate_proj` and `up_proj`, the gate of the original class, and `down_proj`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Linear, Module

from steelyard.observers.padding import padding_mask
from steelyard.observers.routing import RoutedInputs, RoutingPoint

__all__ = ["Expert", "Experts"]


class Expert(Module):
    """One expert; without `gate_proj` where the class has no gate."""

    def __init__(self, gate_proj: Linear | None, up_proj: Linear, down_proj: Linear) -> None:
        super().__init__()
        if gate_proj is not None:
            self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj

    @property
    def entries(self) -> tuple[Linear, ...]:
        """The layers that get the input of the expert."""
        return (self.gate_proj, self.up_proj) if "gate_proj" in self._modules else (self.up_proj,)


class Experts(Module):
    """The experts of a layer, as children "0", "1" and so on.

    gate:   of the original class; maps the outputs of `entries` to the input of `down_proj`
    scaled: whether the router scales inputs, and sends each expert a row for every token, as in
            Llama 4; else it scales outputs

    all_tokens: whether input ranges cover all tokens, not only those routed to the expert
    """

    def __init__(
        self,
        experts: list[Expert],
        gate: Callable[[tuple[torch.Tensor, ...]], torch.Tensor],
        scaled: bool,
    ) -> None:
        super().__init__()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.all_tokens = True
        self._gate = gate
        self._scaled = scaled
        points = [
            RoutingPoint([expert.entries for expert in experts]),
            RoutingPoint([(expert.down_proj,) for expert in experts]),
        ]
        self.__dict__["routing_points"] = tuple(points)

    def forward(self, hidden_states: torch.Tensor, *routing: Any, **named: Any) -> torch.Tensor:
        """Return the sum over experts of the outputs for each row of the hidden states.

        hidden_states: (tokens, hidden); (experts * tokens, hidden) where inputs are scaled
        routing:       experts of each token, and their weights, (tokens, experts of a token)
        """
        batch = self._routed(hidden_states, *routing, *named.values())
        entry, middle = self.__dict__["routing_points"]
        entry(self._inputs(batch, batch.tokens, lambda _, x: x))
        inner: dict[int, torch.Tensor] = {}  # expert -> input of `down_proj`
        for number in range(len(self)):
            if (x := batch.tokens(number)) is not None:
                inner[number] = self._inner(number, x)
        middle(self._inputs(batch, inner.get, self._inner))
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        total = torch.zeros_like(hidden_states, dtype=wide)
        for number, value in inner.items():
            output = self._expert(number).down_proj(value[None])[0].to(wide)
            weights = batch.weights[number]
            total.index_add_(
                0, batch.rows[number], output if weights is None else output * weights[:, None]
            )
        return total.to(hidden_states.dtype)

    def __len__(self) -> int:
        return len(self._modules)

    def _expert(self, number: int) -> Expert:
        expert = self._modules[str(number)]
        assert isinstance(expert, Expert)
        return expert

    def _inner(self, number: int, x: torch.Tensor) -> torch.Tensor:
        sample = x[None]  # compressed-tensors expects (samples, tokens, hidden) for token scales
        return self._gate(tuple(linear(sample)[0] for linear in self._expert(number).entries))

    def _routed(self, hidden: torch.Tensor, *routing: torch.Tensor) -> _Batch:
        if not self._scaled:
            index, weights = routing
            places = [(index == number).nonzero(as_tuple=True) for number in range(len(self))]
            rows = [tokens for tokens, _ in places]
            return _Batch(hidden, rows, [weights[place] for place in places], hidden)
        each = hidden.view(len(self), -1, hidden.shape[-1])  # a row of zeros: not routed there
        count = each.shape[1]
        sent = each.ne(0).any(-1)
        rows = [sent[number].nonzero()[:, 0] + number * count for number in range(len(self))]
        largest = each.square().sum(-1).argmax(0)
        everyone = each[largest, torch.arange(count, device=hidden.device)]
        return _Batch(hidden, rows, [None] * len(self), everyone)

    def _inputs(
        self,
        batch: _Batch,
        tokens: Callable[[int], torch.Tensor | None],
        inner: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> RoutedInputs:
        """Return the inputs of all experts at one point, without padding.

        inner: maps an expert's tokens to its inputs there
        """
        mask = padding_mask()
        mask = None if mask is None else mask.flatten().to(batch.hidden.device)

        def real(number: int, value: torch.Tensor | None) -> torch.Tensor | None:
            if value is None or mask is None:
                return value
            return value[mask[batch.rows[number] % len(mask)]]

        def everyone(number: int) -> torch.Tensor:
            return inner(number, batch.everyone if mask is None else batch.everyone[mask])

        return RoutedInputs(
            batch.hidden.shape,
            lambda number: real(number, tokens(number)),
            lambda number: real(number, batch.weights[number]),
            everyone if self.all_tokens else None,
        )


@dataclass(frozen=True)
class _Batch:
    """The routing of one batch.

    rows:     per expert, its rows of `hidden`
    weights:  per expert, one for each row; None where inputs are scaled
    everyone: one row per token, scaled by the largest weight of any expert
    """

    hidden: torch.Tensor
    rows: list[torch.Tensor]
    weights: list[torch.Tensor | None]
    everyone: torch.Tensor

    def tokens(self, number: int) -> torch.Tensor | None:
        rows = self.rows[number]
        return self.hidden[rows] if len(rows) else None
