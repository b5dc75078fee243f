"""The original shape of a weight, from its stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.formats.tensor_names import PACKED, SCALE, SHAPE, WEIGHT

__all__ = ["original_shape"]


def original_shape(
    stored: Mapping[str, Sequence[int]],
    args: QuantizationArgs | None,
    read: Callable[[str], torch.Tensor],
) -> tuple[int, int] | None:
    """Return (out, in) of a weight before it was quantized; None where no tensor determines it.

    stored: local name -> shape, of a module whose tensors may not match its scheme
    read:   returns a stored tensor
    """
    if WEIGHT in stored:
        rows, columns = stored[WEIGHT]
    elif SHAPE in stored:
        rows, columns = read(SHAPE).tolist()
    elif PACKED in stored and args is not None and args.type == "float":
        rows, width = stored[PACKED]
        columns = width * 8 // args.num_bits
    elif SCALE in stored and args is not None and args.group_size:
        rows, groups = stored[SCALE]
        columns = groups * args.group_size
    else:
        return None
    return rows, columns
