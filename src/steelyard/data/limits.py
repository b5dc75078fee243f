"""How many samples, how long, and which: the numbers that choose calibration data."""

from __future__ import annotations

import operator
from typing import Any

from torch.nn import Embedding

from steelyard.errors import DataError

__all__ = ["check_numbers", "learned_positions"]

SEEDS = range(-(2**63), 2**64)  # what torch takes
SPARE = 8  # rows that a table of positions may have beyond them, as OPT's two


def check_numbers(
    *,
    num_calibration_samples: Any = 1,
    max_seq_length: Any = 1,
    batch_size: Any = 1,
    batch_tokens: Any = None,
    seed: Any = 0,
) -> None:
    """Raise a DataError unless all are whole numbers in their range; None is no number."""
    counts = {
        "num_calibration_samples": num_calibration_samples,
        "max_seq_length": max_seq_length,
        "batch_size": batch_size,
        "batch_tokens": 1 if batch_tokens is None else batch_tokens,
    }
    for name, value in counts.items():
        if _whole(name, value) < 1:
            raise DataError(f"{name} must be at least 1, got {value}")
    if _whole("seed", seed) not in SEEDS:
        raise DataError(f"seed must be a number of 64 bits, got {seed}")


def _whole(name: str, value: Any) -> int:
    remedies = {
        "num_calibration_samples": "; a number larger than the dataset takes all of it",
        "seed": "; leave it out for the default, 0",
    }
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        remedy = remedies.get(name, "")
        raise DataError(f"{name} must be a whole number, got {value!r}{remedy}") from None


def learned_positions(model: Any) -> int | None:
    """Return how many positions a model has learned; None where they are computed, as rotary ones.

    A table of positions is an embedding beside that of the tokens, with a row for each position of
    the config.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    tokens = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tables = (m for m in model.modules() if isinstance(m, Embedding) and m is not tokens)
    rows = (table.weight.shape[0] for table in tables)
    return positions if any(0 <= count - positions <= SPARE for count in rows) else None
