"""Values that are possible but unlikely: what a checkpoint alone tells of damage to its content.

Neither a digest nor the base model is needed. With either of them, other checks are exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from steelyard.checkpoint.digests import Watch, unwatched
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.formats.scale_codes import stored_scale_values
from steelyard.formats.tensor_names import SCALE, holds_values, is_global_scale, is_scale

__all__ = ["copies", "outliers"]

FACTOR = 1000.0
"""In known models, the largest weight of a group is at most 50 times the median of its matrix."""
LARGEST = 65504.0
"""Of fp16, and far above any scale of activations."""
_FEW = 8  # scales that have no meaningful median
_SMALL = 1 << 10  # bytes; small tensors may be equal


def outliers(written: WrittenCheckpoint) -> Iterator[str]:
    """Yield the scales with a value far above all others of the weight, or beyond fp16."""
    for module, leaves in written.tensors.items():
        for leaf in sorted(leaf for leaf in leaves if is_scale(leaf)):
            name = f"{module}.{leaf}"
            values = stored_scale_values(written.shards.read(name)).abs().flatten()
            values = values[torch.isfinite(values) & (values > 0)]
            if is_global_scale(leaf) or not values.numel():
                continue
            largest, usual = float(values.max()), float(values.median())
            if largest > LARGEST:
                yield f"{name} is {largest:.3g}, beyond the range of fp16"
            elif leaf == SCALE and values.numel() >= _FEW and largest > FACTOR * usual:
                yield (
                    f"{name} has a value of {largest:.3g}, {largest / usual:,.0f} times the "
                    "median; a bit of it may be wrong"
                )


def copies(written: WrittenCheckpoint, watch: Watch = unwatched) -> Iterator[str]:
    """Yield the quantized weights whose stored bytes are those of another module."""
    names = [
        f"{module}.{leaf}"
        for module in written.schemes
        for leaf in sorted(filter(holds_values, written.tensors[module]))
    ]
    names = [name for name in names if written.shards.info(name).nbytes >= _SMALL]
    total = sum(written.shards.info(name).nbytes for name in names)
    seen: dict[bytes, str] = {}
    with watch("comparing weights with each other", total, unit="bytes") as advance:
        for name in names:
            digest, constant = hashlib.sha256(), True
            for piece in written.shards.pieces(name):
                digest.update(piece)
                raw = piece.tobytes()
                constant = constant and raw.count(raw[0]) == len(raw)
                advance(len(raw))
            other = seen.setdefault(digest.digest(), name)
            if other != name and not constant:  # experts that were never trained may be zero
                yield f"{name} has the same bytes as {other}"
