"""Quantization parameters of a Linear, as its observers give them."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationScheme

from steelyard.observers import Observer

Tensors = dict[str, torch.Tensor]


def calibrate(weight: torch.Tensor, scheme: QuantizationScheme) -> Tensors:
    """Return the parameters that a calibrated module of this scheme has."""
    generator = torch.Generator().manual_seed(1)
    values = {"weight": weight}
    for base, width in (("input", weight.shape[1]), ("output", weight.shape[0])):
        values[base] = (torch.randn(3, 5, width, generator=generator) + 0.5).to(weight.dtype)
    parts = {
        "weight": scheme.weights,
        "input": scheme.input_activations,
        "output": scheme.output_activations,
    }
    found: Tensors = {}
    for base, args in parts.items():
        if args is None or args.dynamic is True:
            continue
        observer = Observer.load_from_registry("memoryless_minmax", base_name=base, args=args)
        for key, value in observer(values[base]).get_qparams().items():
            if value is not None and (args.dynamic is False or key == "global_scale"):
                found[f"{base}_{key}"] = value
    return found
