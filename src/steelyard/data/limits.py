"""Checks the numeric options of calibration data: count, length, batch size and seed."""

from __future__ import annotations

import operator
from typing import Any

from torch.nn import Embedding

from steelyard.errors import DataError

__all__ = ["check_numbers", "learned_positions"]

SEEDS = range(-(2**63), 2**64)  # the range that torch accepts
SPARE = 8  # extra rows that a position embedding may have, such as OPT's two


def check_numbers(
    *,
    num_calibration_samples: Any = 1,
    max_seq_length: Any = 1,
    batch_size: Any = 1,
    batch_tokens: Any = None,
    seed: Any = 0,
) -> None:
    """Raise a DataError unless all are integers in their range."""
    counts = {
        "num_calibration_samples": num_calibration_samples,
        "max_seq_length": max_seq_length,
        "batch_size": batch_size,
        "batch_tokens": 1 if batch_tokens is None else batch_tokens,
    }
    for name, value in counts.items():
        if _integer(name, value) < 1:
            raise DataError(f"{name} must be at least 1, got {value}")
    if _integer("seed", seed) not in SEEDS:
        raise DataError(f"seed must be a 64-bit integer, got {seed}")


def _integer(name: str, value: Any) -> int:
    remedies = {
        "num_calibration_samples": "; pass a number larger than the dataset to use all of it",
        "seed": "; omit it for the default, 0",
    }
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        remedy = remedies.get(name, "")
        raise DataError(f"{name} must be an integer, got {value!r}{remedy}") from None


def learned_positions(model: Any) -> int | None:
    """Return the number of learned positions; None if they are computed, such as rotary ones.

    A position embedding is an Embedding other than that of the tokens, with one row for each
    position of the config.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    tokens = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tables = (m for m in model.modules() if isinstance(m, Embedding) and m is not tokens)
    rows = (table.weight.shape[0] for table in tables)
    return positions if any(0 <= count - positions <= SPARE for count in rows) else None
