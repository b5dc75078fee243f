"""Experts of one layer share a scale for their inputs, and statistics where they have few tokens.

A server quantizes the inputs of all experts of a layer with one scale, so their observers use the
statistics of all. The importance of an expert is shrunk toward that of its layer
(`kernels.shrinkage`), as its Hessian is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steelyard.fusion import ExpertGroup, expert_groups, shared_parameter
from steelyard.kernels.shrinkage import isotropic, prior_factor, prior_tokens
from steelyard.observers.combine import combine
from steelyard.observers.lifecycle import Calibration
from steelyard.observers.observer_state import state_of
from steelyard.observers.steps import observer_of
from steelyard.words import count

__all__ = ["importance_priors", "share_among_experts", "starved_experts"]

Sums = Mapping[str, tuple[torch.Tensor, int]]
"""Module -> sum of x^2 per input channel, and number of tokens."""


def share_among_experts(calibration: Calibration) -> None:
    """Share ranges and importance among the experts of each layer, after `sync`."""
    gathering = calibration.gathering()
    sums = {name: o.gathered for name, o in gathering.items()}
    known = {name: each for name, each in sums.items() if each is not None}
    for group in expert_groups(calibration.modules):
        _share_ranges(calibration, group)
        for name, prior in importance_priors(group, known).items():
            if name in gathering:
                gathering[name].add_importance(*prior)


def _share_ranges(calibration: Calibration, group: ExpertGroup) -> None:
    """Give the input observers of all experts the combined statistics, if they share a scale."""
    found = {name: observer_of(calibration.modules[name], "input") for name in group.names}
    sharing = {
        name: observer
        for name, observer in found.items()
        if observer is not None and shared_parameter(observer.args, "input") is not None
    }
    first = [names[0] for names in group.experts.values() if names[0] in sharing]
    states = [state_of(sharing[name]) for name in first if sharing[name].has_statistics]
    for observer in sharing.values() if states and len(first) > 1 else ():
        combine(observer, states)


def importance_priors(group: ExpertGroup, sums: Sums) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the sums and tokens that the layer adds to each module of its experts."""
    known = [sums[names[0]] for names in group.experts.values() if names[0] in sums]
    if not known:
        return {}
    total = torch.stack([squares.double() for squares, _ in known]).sum(0)
    columns = len(total)
    total *= prior_factor(columns, sum(tokens for _, tokens in known))
    prior = (isotropic(total) if group.inner else total).float()
    return dict.fromkeys(group.names, (prior, prior_tokens(columns)))


def starved_experts(calibration: Calibration) -> list[str]:
    """Return a sentence for each layer with experts that got fewer tokens than input channels."""
    found = []
    for group in expert_groups(calibration.routed):
        if group.inner:  # gets the same tokens as the outer group
            continue
        first = {number: names[0] for number, names in group.experts.items()}
        tokens = {number: calibration.tokens(name) for number, name in first.items()}
        starved = [n for n in first if tokens[n] < prior_tokens(_columns(calibration, first[n]))]
        if starved:
            listed = ", ".join(f"{number} ({count(tokens[number], 'token')})" for number in starved)
            found.append(
                f"{group.layer}: {len(starved)} of {count(len(first), 'expert')} got fewer tokens "
                "than they have input channels, so the layer's statistics outweigh their own: "
                f"{listed}"
            )
    return found


def _columns(calibration: Calibration, name: str) -> int:
    weight: Any = calibration.modules[name].weight
    return int(weight.shape[1])
