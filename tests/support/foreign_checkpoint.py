"""Checkpoints in the layout of llm-compressor: loaded in bf16, each Linear packed by itself.

The scales come from compressed-tensors' own functions, and nothing is shared between layers that a
server fuses, except NVFP4's global scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from steelyard.formats import format_of
from steelyard.kernels.scale_blocks import scale_shape


def write_foreign(base: Path, folder: Path, preset: str, **weights: Any) -> Path:
    """Write a quantized copy of a base model.

    weights: fields of the preset's weight arguments to change
    """
    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights.model_copy(update=weights)
    scheme = scheme.model_copy(update={"weights": args})
    tensors = {
        name: value.bfloat16() for name, value in load_file(base / "model.safetensors").items()
    }
    stored: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        for local, part in _packed(value, scheme).items():
            stored[f"{module}.{local}"] = part.contiguous()
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    group = {**scheme.model_dump(mode="json"), "format": format_of(scheme)}
    config |= {
        "dtype": "bfloat16",
        "quantization_config": {
            "config_groups": {"group_0": group},
            "format": format_of(scheme),
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": compressed_tensors.__version__,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _packed(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    args = scheme.weights
    rows, columns = weight.shape
    shape = scale_shape(args, (rows, columns))
    if args.strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    else:
        groups = weight.reshape(rows, shape[-1], -1)
        low, high = groups.amin(-1), groups.amax(-1)
    qparams: dict[str, torch.Tensor] = {}
    if args.strategy == "tensor_group":  # one for the model: at least as large as each needs
        limit = torch.tensor([1.0])
        qparams["weight_global_scale"] = generate_gparam(-limit, limit).float()
    scale, zero_point = calculate_qparams(
        low, high, args, global_scale=qparams.get("weight_global_scale")
    )
    qparams |= {"weight_scale": scale, "weight_zero_point": zero_point}
    compressor = BaseCompressor.get_value_from_registry(format_of(scheme))
    return dict(compressor.compress({"weight": weight, **qparams}, scheme))
