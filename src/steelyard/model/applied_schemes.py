"""Applies a quantization config to the modules of a model."""

from __future__ import annotations

import inspect

from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from torch.nn import Module

__all__ = ["apply_schemes"]


def apply_schemes(model: Module, config: QuantizationConfig) -> None:
    """Attach schemes and empty quantization parameters to modules, without a progress bar."""
    quiet = "show_progress" in inspect.signature(apply_quantization_config).parameters
    apply_quantization_config(model, config, **({"show_progress": False} if quiet else {}))
