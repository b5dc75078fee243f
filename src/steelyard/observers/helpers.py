"""Shapes: brings every observed value to one form, and counts the tokens of a model's observers.

The canonical shape is (num_observations, *qparam_shape, group_size): reducing it over its first
and last dimension leaves one number per quantization parameter.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from steelyard.errors import StrategyError
from steelyard.fusion import FUSED_LAYER_NAMES
from steelyard.kernels.scale_blocks import group_count
from steelyard.observers.linked import fuse_weight_observers

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = [
    "ACTIVATION_NAMES",
    "FUSED_LAYER_NAMES",
    "STRATEGIES",
    "check_strategy",
    "count_tokens",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "get_observer_token_count",
    "group_order",
    "view_blocks",
]

ACTIVATION_NAMES = ("input", "output")
_ATTENTION_NAMES = ("q", "k", "v")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "weight": ("tensor", "channel", "group", "tensor_group", "block"),
    **dict.fromkeys(ACTIVATION_NAMES, ("tensor", "token", "group", "tensor_group")),
    **dict.fromkeys(_ATTENTION_NAMES, ("tensor", "attn_head")),
}
"""Base name -> the strategies that can be calibrated for it."""


def check_strategy(base_name: str, args: QuantizationArgs) -> None:
    """Raise unless values called `base_name` can be quantized with `args.strategy`."""
    if base_name not in STRATEGIES:
        raise StrategyError(
            f"unknown base name {base_name!r}: a value is one of {', '.join(STRATEGIES)}"
        )
    if args.strategy not in STRATEGIES[base_name]:
        raise StrategyError(
            f"strategy {_plain(args.strategy)!r} cannot quantize a value of kind {base_name!r}: "
            f"use {', '.join(STRATEGIES[base_name])}"
        )


def flatten_for_calibration(
    value: torch.Tensor, base_name: str, args: QuantizationArgs
) -> torch.Tensor:
    """Bring an observed value to (num_observations, *qparam_shape, group_size).

    =========  ============  ==============================  ==========================
    kind       strategy      value                           result
    =========  ============  ==============================  ==========================
    weight     tensor        (out, in)                       (1, 1, out * in)
    weight     channel       (out, in)                       (1, out, 1, in)
    weight     group         (out, in)                       (1, out, in / g, g)
    weight     block         (out, in), zero-padded          (1, out / h, in / w, h * w)
    in/output  tensor        (batch, seq, hidden)            (batch * seq, 1, hidden)
    in/output  token         (batch, seq, hidden)            (1, batch, seq, 1, hidden)
    in/output  group         (batch, seq, hidden)            (batch * seq, hidden / g, g)
    q, k, v    tensor        (batch, heads, seq, head_dim)   (batch * seq, 1, heads * head_dim)
    q, k, v    attn_head     (batch, heads, seq, head_dim)   (batch * seq, heads, 1, 1, head_dim)
    =========  ============  ==============================  ==========================

    `tensor_group` flattens as `group`.
    """
    check_strategy(base_name, args)
    if base_name == "weight":
        return _flatten_weight(value, args)
    if base_name in ACTIVATION_NAMES:
        return _flatten_activation(value, args)
    return _flatten_attention(value, args)


def _flatten_weight(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    if args.strategy == "tensor":
        return value.reshape(1, 1, -1)
    if args.strategy == "channel":
        return value.unsqueeze(-2).unsqueeze(0)  # (1, out, 1, in)
    if args.strategy == "block":
        return _flatten_blocks(value, args)
    return _split_groups(value, args).unsqueeze(0)  # (1, out, in / g, g)


def _flatten_blocks(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    return view_blocks(value, args).flatten(-2, -1)  # (1, out / h, in / w, h * w)


def view_blocks(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """View a weight as (1, out / h, in / w, h, w), without a copy where the blocks divide it."""
    from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant

    if value.ndim != 2:
        raise StrategyError(
            f"strategy 'block' needs a weight of two dimensions, got shape {tuple(value.shape)}"
        )
    height, width = args.block_structure
    # zero is always representable without error, so padding moves no parameter
    padded: torch.Tensor = maybe_pad_tensor_for_block_quant(value, (height, width))
    rows, columns = padded.shape[0] // height, padded.shape[1] // width
    return padded.reshape(rows, height, columns, width).transpose(1, 2).unsqueeze(0)


def _flatten_activation(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    if args.strategy == "tensor":
        return value.reshape(-1, 1, value.shape[-1])
    if args.strategy == "token":
        return value.unsqueeze(-2).unsqueeze(0)  # (1, batch, seq, 1, hidden)
    groups = _split_groups(value, args)  # (batch, seq, hidden / g, g)
    return groups.reshape(-1, *groups.shape[-2:])


def _flatten_attention(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    if value.ndim != 4:
        raise StrategyError(
            f"an attention state has shape (batch, heads, seq, head_dim), got {tuple(value.shape)}"
        )
    tokens = value.transpose(1, 2).flatten(0, 1)  # (batch * seq, heads, head_dim)
    if args.strategy == "tensor":
        return tokens.flatten(-2, -1).unsqueeze(-2)  # (batch * seq, 1, heads * head_dim)
    return tokens.unsqueeze(-2).unsqueeze(-2)  # (batch * seq, heads, 1, 1, head_dim)


def _split_groups(value: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    count = group_count(args, value.shape)
    return value.reshape(*value.shape[:-1], count, args.group_size)


def group_order(
    g_idx: torch.Tensor, columns: int, base_name: str, args: QuantizationArgs
) -> torch.Tensor | None:
    """Return the column order that makes each group contiguous.

    g_idx:   (columns,), the group of each column; all -1 while activation ordering has not set it
    returns: (columns,) permutation, or None for the stored order
    """
    if base_name != "weight" or args.strategy not in ("group", "tensor_group"):
        raise StrategyError(
            "g_idx maps the columns of a weight to groups: it needs base name 'weight' with "
            f"strategy group or tensor_group, got {base_name!r} with {_plain(args.strategy)!r}"
        )
    if g_idx.shape != (columns,):
        raise StrategyError(
            f"g_idx has shape {tuple(g_idx.shape)}, but the weight has {columns} columns"
        )
    if bool((g_idx == -1).all()):
        return None
    sizes = torch.bincount(g_idx.clamp(min=0))
    if bool((g_idx < 0).any()) or bool((sizes != args.group_size).any()):
        raise StrategyError(
            f"g_idx must put exactly {args.group_size} columns into each group, "
            f"got groups of {sorted(set(sizes.tolist()))} columns, "
            f"and {int((g_idx < 0).sum())} columns without a group"
        )
    return torch.argsort(g_idx, stable=True)


def count_tokens(value: torch.Tensor, base_name: str) -> int:
    """Return how many tokens a value holds; a weight holds none."""
    if base_name == "weight":
        return 0
    per_token = value.shape[-1]
    if base_name in _ATTENTION_NAMES:  # (batch, heads, seq, head_dim)
        per_token *= value.shape[1]
    return value.numel() // per_token


def get_observer_token_count(model: torch.nn.Module) -> Counter[str]:
    """Return the number of tokens that reached each module's activation observers."""
    from steelyard.observers.base import Observer

    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, Observer) and module.base_name != "weight":
            owner = name.rpartition(".")[0]
            counts[owner] = max(counts[owner], module.num_observed_tokens)
    return counts


def _plain(strategy: object) -> str:
    return str(getattr(strategy, "value", strategy))
