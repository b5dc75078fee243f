"""Opens a checkpoint as a model that computes as it is served, with its weights in the files.

Weights are decoded when they are read. compressed-tensors itself quantizes activations and the KV
cache in the forward pass, as in transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus
from torch.nn import Module, Parameter

from steelyard.checkpoint.config_file import check_patterns
from steelyard.checkpoint.decoded import DecodedView
from steelyard.errors import CheckpointError
from steelyard.model.applied_schemes import apply_schemes
from steelyard.model.model_folder import model_folder
from steelyard.model.served_hooks import attach_rotations
from steelyard.model.skeleton import build_skeleton
from steelyard.model.source import Source

__all__ = ["open_model"]

_OF_WEIGHTS = re.compile(r"weight_(scale|zero_point|global_scale|g_idx)")
_OF_ACTIVATIONS = re.compile(r"(input|output|q|k|v)_(scale|zero_point|global_scale)")


def open_model(model: str | Path, trust_remote_code: bool = False) -> tuple[Source, list[str]]:
    """Return a model from a folder or the hub, and notes on differences from how it is served."""
    folder = model_folder(model)
    view = DecodedView(folder)
    skeleton, keys, joined = build_skeleton(folder, view, trust_remote_code)
    source = Source(skeleton, view, keys, joined)
    if view.quantization is None:
        return source, []
    _widen(skeleton, joined)
    check_patterns(folder, view.quantization, [name for name, _ in skeleton.named_modules()])
    status = {"quantization_status": QuantizationStatus.COMPRESSED}
    apply_schemes(skeleton, view.quantization.model_copy(update=status))
    for rotation in view.served:
        attach_rotations(skeleton, rotation, view.matrix)
    for name, module in skeleton.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _attach(source, view, name, module)
    return source, _joined_inputs(source, view)


def _widen(model: Module, joined: dict[str, list[str]]) -> None:
    """Give tensors that the class stacks from decoded ones their type, fp32."""
    for name in joined:
        module, _, leaf = name.rpartition(".")
        parent = model.get_submodule(module)
        shape = parent.get_parameter(leaf).shape
        meta = torch.empty(shape, dtype=torch.float32, device="meta")
        parent._parameters[leaf] = Parameter(meta, requires_grad=False)


def _attach(source: Source, view: DecodedView, name: str, module: Any) -> None:
    """Read the activation parameters of a module; its weight is decoded when it is read."""
    args = module.quantization_scheme.weights
    if args is not None:
        key = source.module_key(name)
        if key not in view.schemes:
            raise CheckpointError(
                f"{view.folder}: config.json quantizes {name}, but {key} is stored unquantized; "
                "a server would generate garbage, so add it to ignore or quantize the model again"
            )
        if args != view.schemes[key].weights:
            raise CheckpointError(
                f"{view.folder}: config.json has two schemes for {name}, by name and by class; "
                "name each module once"
            )
    module.quantization_status = QuantizationStatus.COMPRESSED  # no rounding in forward
    for leaf, parameter in list(module._parameters.items()):
        if _OF_WEIGHTS.fullmatch(leaf):
            del module._parameters[leaf]
        elif _OF_ACTIVATIONS.fullmatch(leaf):
            value = _read(view, source.key(f"{name}.{leaf}"), parameter)
            module._parameters[leaf] = Parameter(value, requires_grad=False)


def _read(view: DecodedView, key: str, like: torch.Tensor) -> torch.Tensor:
    if key not in view:
        raise CheckpointError(
            f"{view.folder} has no {key}, which config.json asks for; a server would generate "
            "garbage, so quantize the model again"
        )
    value = view.read(key)
    if value.numel() != like.numel():
        raise CheckpointError(
            f"{view.folder}: {key} is {tuple(value.shape)}, but config.json makes it "
            f"{tuple(like.shape)}; quantize the model again"
        )
    value = value.reshape(like.shape)
    return value.float() if value.is_floating_point() else value


def _joined_inputs(source: Source, view: DecodedView) -> list[str]:
    """Return a note on matrices that the class stacks, whose inputs no module quantizes.

    Raise for a module with quantized weights that no target matches.
    """
    alone = set()
    for name, module in source.model.named_modules():
        key = source.module_key(name)
        if "weight" not in module._parameters or key not in view.schemes:
            continue
        if getattr(module, "quantization_scheme", None) is None:
            raise CheckpointError(
                f"{view.folder} holds quantized weights for {key}, but no target of config.json "
                f"matches {name}; quantize the model again"
            )
        alone.add(key)
    joined = [s for module, s in view.schemes.items() if module not in alone]
    count = sum(scheme.input_activations is not None for scheme in joined)
    if not count:
        return []
    return [
        f"the inputs of {count} matrices, such as experts, are not quantized here, since "
        f"{type(source.model).__name__} has no module for each; a server quantizes them"
    ]
