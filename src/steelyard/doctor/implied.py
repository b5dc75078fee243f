"""The format and arguments of a weight that its stored tensors imply, whatever the config says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.checkpoint.shards import TensorInfo
from steelyard.formats.tensor_names import (
    GLOBAL_SCALE,
    PACKED,
    SCALE,
    SHAPE,
    WEIGHT,
    ZERO_POINT,
)

__all__ = ["Implied", "implied_by"]

_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Implied:
    """What the tensors of a weight imply.

    args: fields of `QuantizationArgs`
    """

    format: str
    args: tuple[tuple[str, Any], ...]

    def differs(self, args: QuantizationArgs) -> dict[str, Any]:
        """Return the fields in which a scheme differs."""
        return {name: value for name, value in self.args if getattr(args, name) != value}


def implied_by(
    tensors: Mapping[str, TensorInfo],
    args: QuantizationArgs | None,
    read: Callable[[str], torch.Tensor],
) -> Implied | None:
    """Return what the tensors of a module imply; None if they are not those of a known format.

    tensors: by local name
    args:    those of the config, which decide where tensors leave a choice
    read:    returns a tensor by its local name
    """
    scale = tensors.get(SCALE)
    if scale is None:
        return None
    if PACKED in tensors and tensors[PACKED].dtype == torch.int32 and SHAPE in tensors:
        return _packed_integers(tensors, args, tuple(map(int, read(SHAPE).tolist())))
    if PACKED in tensors and tensors[PACKED].dtype == torch.uint8:
        if GLOBAL_SCALE in tensors and scale.dtype == _E4M3:
            return _implied("nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16)
        if scale.dtype == torch.uint8:
            return _implied("mxfp4-pack-quantized", "float", 4, "group", group_size=32)
        return None
    if WEIGHT not in tensors or len(tensors[WEIGHT].shape) != 2:
        return None
    weight = tensors[WEIGHT]
    if weight.dtype == torch.int8:
        return _bytes("int-quantized", "int", weight.shape, scale.shape, ZERO_POINT not in tensors)
    if weight.dtype != _E4M3:
        return None
    if scale.dtype == torch.uint8:
        return _implied("mxfp8-quantized", "float", 8, "group", group_size=32)
    return _bytes("float-quantized", "float", weight.shape, scale.shape, True)


def _implied(format: str, type: str, bits: int, strategy: str, **more: Any) -> Implied:
    fields = {"type": type, "num_bits": bits, "strategy": strategy, "symmetric": True, **more}
    return Implied(format, tuple(fields.items()))


def _packed_integers(
    tensors: Mapping[str, TensorInfo], args: QuantizationArgs | None, shape: tuple[int, ...]
) -> Implied | None:
    words, groups = tensors[PACKED].shape[-1], tensors[SCALE].shape[-1]
    if len(shape) != 2 or not groups or shape[1] % groups:
        return None
    fitting = [bits for bits in range(2, 9) if -(-shape[1] // (32 // bits)) == words]
    chosen = args.num_bits if args is not None and args.num_bits in fitting else None
    if chosen is None and len(fitting) != 1:
        fitting = [bits for bits in fitting if bits in (4, 8)]
        if len(fitting) != 1:
            return None
    size = shape[1] // groups
    by_channel = groups == 1 and (args is None or args.group_size != size)
    return _implied(
        "pack-quantized",
        "int",
        chosen or fitting[0],
        "channel" if by_channel else "group",
        symmetric=ZERO_POINT not in tensors,
        **({} if by_channel else {"group_size": size}),
    )


def _bytes(
    format: str, type: str, shape: tuple[int, ...], scale: tuple[int, ...], symmetric: bool
) -> Implied | None:
    if scale in ((), (1,)):
        return _implied(format, type, 8, "tensor", symmetric=symmetric)
    if scale == (shape[0], 1):
        return _implied(format, type, 8, "channel", symmetric=symmetric)
    blocks = tuple(-(-size // 128) for size in shape)
    if scale == blocks and type == "float":
        return _implied(format, type, 8, "block", block_structure=[128, 128])
    return None
