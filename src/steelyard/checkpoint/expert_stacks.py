"""Experts that a file stacks in one tensor, and the names that servers use for each of them.

Most mixtures of experts store a tensor for each expert and projection. Some stack all experts of a
layer: (experts, out, in) or (experts, in, out), gate and up in one tensor, concatenated or, in
gpt-oss, interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PAIRS", "Stack", "is_turned", "parts_of_stack"]

PAIRS = {
    "gate_up_proj": "down_proj",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.output_linear.weight",
}
"""How the names of two stacks of one layer end: gate and up, and down."""

_PARTS = {
    "gate_up_proj": (".", ("gate_proj.weight", "up_proj.weight")),
    "gate_up_proj_bias": (".", ("gate_proj.bias", "up_proj.bias")),
    "up_proj": (".", ("up_proj.weight",)),
    "down_proj": (".", ("down_proj.weight",)),
    "down_proj_bias": (".", ("down_proj.bias",)),
    "input_linear.weight": (".experts.", ("gate_proj.weight", "up_proj.weight")),
    "output_linear.weight": (".experts.", ("down_proj.weight",)),
}


@dataclass(frozen=True)
class Stack:
    """Experts that are stored in one tensor.

    experts: names of each expert's weights here
    """

    name: str
    experts: tuple[str, ...]


def parts_of_stack(name: str, experts: int) -> list[tuple[str, ...]]:
    """Return the names of the tensors of each expert in a stack, in order.

    >>> parts_of_stack("mlp.experts.gate_up_proj", 1)
    [('mlp.experts.0.gate_proj.weight', 'mlp.experts.0.up_proj.weight')]
    """
    ending = next(ending for ending in _PARTS if name.endswith(f".{ending}"))
    between, leaves = _PARTS[ending]
    parent = name.removesuffix(f".{ending}")
    return [
        tuple(f"{parent}{between}{expert}.{leaf}" for leaf in leaves) for expert in range(experts)
    ]


def is_turned(gate_up: tuple[int, ...], down: tuple[int, ...], hidden: object) -> bool | None:
    """Whether experts are stored as (in, out); None where the shapes are ambiguous.

    The output of `down_proj` has the model's width, and its input half the rows of `gate_up_proj`.
    """
    as_linear = down[1] == hidden and gate_up[1:] == (2 * down[2], hidden)
    as_product = down[2] == hidden and gate_up[1:] == (hidden, 2 * down[1])
    return None if as_linear == as_product else as_product
