"""Hooks that pass activations to observers during calibration.

A padded batch runs under `without_padding(mask)`, and the hooks skip the padding. Values are
observed in the type that will be served, even if the forward pass runs in fp32 for speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from steelyard.observers.padding import real_tokens, without_padding
from steelyard.observers.steps import args_for, observer_of

__all__ = [
    "calibrate_input_hook",
    "calibrate_key_hook",
    "calibrate_output_hook",
    "calibrate_query_hook",
    "calibrate_value_hook",
    "register_hooks",
    "without_padding",
]


def calibrate_input_hook(module: Module, args: Any) -> None:
    """Forward-pre hook of a Linear."""
    value = args[0] if isinstance(args, tuple) else args
    _observe(module, "input", value)


def calibrate_output_hook(module: Module, _args: Any, output: torch.Tensor) -> None:
    """Forward hook of a Linear."""
    _observe(module, "output", output)


def calibrate_query_hook(module: Module, query_states: torch.Tensor) -> None:
    _observe(module, "q", query_states)


def calibrate_key_hook(module: Module, key_states: torch.Tensor) -> None:
    _observe(module, "k", key_states)


def calibrate_value_hook(module: Module, value_states: torch.Tensor) -> None:
    _observe(module, "v", value_states)


def register_hooks(module: Module, inputs: bool = True) -> list[RemovableHandle]:
    """Register the hooks that the observers on `module` need.

    inputs: whether a hook observes inputs
    """
    handles: list[RemovableHandle] = []
    if inputs and observer_of(module, "input") is not None:
        handles.append(module.register_forward_pre_hook(calibrate_input_hook))
    if observer_of(module, "output") is not None:
        handles.append(module.register_forward_hook(calibrate_output_hook))
    states = {
        "q": ("register_query_hook", calibrate_query_hook),
        "k": ("register_key_hook", calibrate_key_hook),
        "v": ("register_value_hook", calibrate_value_hook),
    }
    for base_name, (register, hook) in states.items():
        if observer_of(module, base_name) is not None:
            from compressed_tensors import modeling

            handles.append(getattr(modeling, register)(module, hook))
    return handles


def _observe(module: Module, base_name: str, value: torch.Tensor) -> None:
    observer = observer_of(module, base_name)
    assert observer is not None
    value = real_tokens(value, base_name)
    observer(value.to(_served_dtype(module, base_name, value.dtype)))


def _served_dtype(module: Module, base_name: str, default: torch.dtype) -> torch.dtype:
    scale = getattr(module, f"{base_name}_scale", None)
    if scale is None:  # only its global scale is static: the weight's scale has the model's type
        scale = getattr(module, "weight_scale", None)
    args = args_for(module, base_name)
    assert args is not None
    return default if scale is None else scale.dtype
