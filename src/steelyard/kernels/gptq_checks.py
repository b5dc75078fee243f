"""Argument checks of GPTQ: matching shapes, finite values, complete column orders."""

from __future__ import annotations

import torch

from steelyard.errors import NonFiniteError, StrategyError

__all__ = ["check_problem"]


def check_problem(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    block_size: int,
    dampening_frac: float,
    order: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    target: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of `gptq_rounding.solve` fit together."""
    columns = weight.shape[-1]
    if weight.ndim != 2 or hessian.shape != (columns, columns):
        raise StrategyError(
            f"a weight (out, in) needs a Hessian (in, in), got {tuple(weight.shape)} and "
            f"{tuple(hessian.shape)}"
        )
    if block_size < 1 or not 0 <= dampening_frac < float("inf"):
        raise ValueError(
            "block_size must be positive and dampening_frac finite and not negative, got "
            f"{block_size} and {dampening_frac}"
        )
    if target is not None and target.shape != weight.shape:
        raise StrategyError(
            f"the target of a weight {tuple(weight.shape)} has shape {tuple(target.shape)}"
        )
    given = {"weight": weight, "Hessian": hessian}
    for name, tensor in (given if target is None else {**given, "target": target}).items():
        low, high = tensor.aminmax()  # NaN if there is one
        if not bool(low.isfinite() & high.isfinite()):
            row, column = (~tensor.isfinite()).nonzero()[0].tolist()
            raise NonFiniteError(
                f"the {name} holds {tensor[row, column]} at row {row}, column {column}; inputs "
                "that overflow, or a layer before this one, are the usual cause"
            )
    reach = hessian.diagonal().abs().sqrt() * hessian[0, 0].abs().sqrt()
    if not bool(((hessian[0] - hessian[:, 0]).abs() <= 1e-3 * reach).all()):
        raise ValueError("the Hessian is not symmetric; pass it through hessian.symmetric() first")
    for name, index in (("order", order), ("g_idx", g_idx)):
        if index is not None and index.shape != (columns,):
            raise ValueError(
                f"{name} must hold one entry for each of {columns} columns, got "
                f"{tuple(index.shape)}"
            )
    if order is not None and not torch.equal(order.sort().values, torch.arange(columns).to(order)):
        raise ValueError("order must hold every column once")
