"""Attention with products in bf16: scores, softmax and sums stay in fp32.

torch multiplies in bf16 too, but neither packs keys and values nor skips the keys that a query does
not see. The reference is torch's function (scaled_dot_product_attention).
"""

from __future__ import annotations

import torch

from steelyard.kernels import compiled
from steelyard.kernels.backend import extension, instruction_set, use_compiled

__all__ = ["attention", "has_attention"]


def has_attention() -> bool:
    """Whether this processor has the compiled attention; where there is AMX, torch's uses that."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return not amx and extension()[0] is not None and instruction_set() == "avx512_bf16"


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None = None,
) -> torch.Tensor | None:
    """Return the output, (batch, tokens, heads, width); None where this cannot compute it.

    query: (batch, heads, tokens, width), fp32 or bf16; fp32 is rounded to bf16, and so are key and
           value, of which several heads can share one
    mask:  which keys a query sees, bool, a range of them for each query: causal, a sliding window,
           padding; (batch or 1, 1, tokens, keys)
    causal: without a mask, whether a query sees no key after its own place
    scale: of the scores; the width to the power -1/2 by default
    """
    states = (query, key, value)
    plain = all(each.dim() == 4 and each.dtype == query.dtype for each in states)
    if not plain or query.dtype not in (torch.float32, torch.bfloat16) or not has_attention():
        return None
    batch, heads, tokens, width = query.shape
    shared, keys = key.shape[1], key.shape[2]
    shapes = key.shape == (batch, shared, keys, width) and value.shape[:3] == key.shape[:3]
    scale = width**-0.5 if scale is None else scale
    if not shapes or min(query.numel(), value.numel()) == 0 or heads % shared or width % 2:
        return None
    if mask is not None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
            return None
        if mask.shape[0] not in (1, batch) or mask.shape[2:] != (tokens, keys):
            return None
    if scale <= 0 or not all(use_compiled(each) for each in states):
        return None
    output = query.new_empty(batch, tokens, heads, value.shape[-1])
    computed = compiled.native().attention(
        *map(_by_row, states),
        None if mask is None else _by_row(mask[:, 0]),
        causal,
        scale,
        output,
        instruction_set(),
        compiled.threads(query),
    )
    return output if computed else None


def _by_row(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x if x.stride(-1) == 1 else x.contiguous()
