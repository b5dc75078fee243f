"""Names and defaults that need no torch."""

from __future__ import annotations

__all__ = ["ACTIVATION_OBSERVER", "WEIGHT_OBSERVER", "default_observer"]

WEIGHT_OBSERVER = "optimal"
"""Observer for weights unless the user names one: the least KL divergence without data."""

ACTIVATION_OBSERVER = "minmax"
"""Observer for static activations and the KV cache unless the user or the preset names one."""


def default_observer(base_name: str) -> str:
    """Return the observer for values called weight | input | output | q | k | v."""
    return WEIGHT_OBSERVER if base_name == "weight" else ACTIVATION_OBSERVER
