"""Finds the search that runs instead of the reference: the compiled one, or Triton's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from steelyard.kernels import compiled
from steelyard.kernels.backend import use_compiled, use_triton

if TYPE_CHECKING:
    from types import ModuleType

    import torch
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["fast_search"]

_TRITON = {"search_range": "triton_search", "optimal_qparams": "triton_optimal"}


def fast_search(
    name: str,
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    backend: str | None,
) -> Callable[..., Any] | None:
    """Return `search_range` or `optimal_qparams` for a tensor; None where the reference runs."""
    if not compiled.supports(args, scale_dtype):
        return None
    if use_compiled(observed, backend):
        module: ModuleType = compiled
    elif use_triton(observed, backend):
        module = import_module(f"steelyard.kernels.{_TRITON[name]}")
    else:
        return None
    search: Callable[..., Any] = getattr(module, name)
    return search
