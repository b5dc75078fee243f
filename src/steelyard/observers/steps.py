"""The steps of calibration, one function each, on modules that carry a quantization scheme.

compressed-tensors puts the scheme and empty parameters (`weight_scale`, ...) on a module. During
calibration, the module has observers as `weight_observer`, `input_observer` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from torch.nn import Module, Parameter

from steelyard.names import default_observer
from steelyard.observers import Observer

__all__ = [
    "ACTIVATIONS",
    "apply_calibration_status",
    "args_for",
    "freeze_module_quantization",
    "initialize_observer",
    "observe",
    "observer_of",
    "remove_observers",
    "reset_quantization_status",
    "update_qparams",
]

ACTIVATIONS = ("input", "output", "q", "k", "v")
BASE_NAMES = ("weight", *ACTIVATIONS)
_FIELDS = {"weight": "weights", "output": "output_activations"}


def args_for(module: Module, base_name: str) -> QuantizationArgs | None:
    """Return how the scheme on `module` quantizes a value, or None where it does not.

    base_name: weight | input | output | q | k | v; attention states follow the input's arguments
    """
    scheme = getattr(module, "quantization_scheme", None)
    field = _FIELDS.get(base_name, "input_activations")
    return None if scheme is None else getattr(scheme, field)


def has_coarse_inputs(module: Module) -> bool:
    """Whether the inputs of a module are rounded to fewer than 8 bits."""
    args = args_for(module, "input")
    return args is not None and args.num_bits < 8


def observer_of(module: Module, base_name: str) -> Observer | None:
    found = getattr(module, f"{base_name}_observer", None)
    return found if isinstance(found, Observer) else None


def initialize_observer(module: Module, base_name: str) -> None:
    """Add the observer that the scheme names to `module`; dynamic values need none.

    If the scheme names none, use the default of `steelyard.names`.
    """
    args = args_for(module, base_name)
    if args is None or args.dynamic is True:
        return
    name = args.observer or default_observer(base_name, args.strategy)
    observer = Observer.load_from_registry(name, base_name=base_name, args=args)
    module.register_module(f"{base_name}_observer", observer)
    observer.attach(module)


@torch.no_grad()
def observe(module: Module | Iterable[Module], base_name: str) -> None:
    """Pass a module's value of that name to its observer; used for weights."""
    for each in _modules(module):
        observer = observer_of(each, base_name)
        if observer is not None:
            groups = getattr(each, f"{base_name}_g_idx", None)
            observer(getattr(each, base_name), **({} if groups is None else {"g_idx": groups}))


@torch.no_grad()
def update_qparams(
    module: Module | Iterable[Module],
    base_name: str | Iterable[str],
    only_update_onload: bool = False,
) -> None:
    """Compute parameters from the statistics and store them on the module.

    For a dynamic value only the global scale is stored, if it has one. Observers without statistics
    are skipped; the caller decides whether that is an error.

    only_update_onload: accepted for scripts that pass it; nothing is offloaded here
    """
    names = [base_name] if isinstance(base_name, str) else list(base_name)
    for each in _modules(module):
        for name in names:
            observer = observer_of(each, name)
            if observer is None or not observer.has_statistics:
                continue
            for kind, value in observer.get_qparams().items():
                if isinstance(value, torch.Tensor):
                    _store(each, f"{name}_{kind}", value)


def _store(module: Module, name: str, value: torch.Tensor) -> None:
    present = getattr(module, name, None)
    if present is None:  # not part of the scheme, such as the local scale of a dynamic value
        return
    stored = value.to(present.dtype)
    if stored.shape != present.shape:
        stored = stored.reshape(present.shape)
    module.register_parameter(name, Parameter(stored, requires_grad=False))


def apply_calibration_status(module: Module) -> None:
    if getattr(module, "quantization_scheme", None) is not None:
        module.quantization_status = QuantizationStatus.CALIBRATION


def freeze_module_quantization(module: Module) -> None:
    """Remove the observers; the parameters stay."""
    if getattr(module, "quantization_scheme", None) is None:
        return
    if getattr(module, "quantization_status", None) == QuantizationStatus.FROZEN:
        return
    remove_observers(module)
    module.quantization_status = QuantizationStatus.FROZEN


def remove_observers(module: Module) -> None:
    for base_name in BASE_NAMES:
        observer = observer_of(module, base_name)
        if observer is not None:
            observer.detach(module)
            delattr(module, f"{base_name}_observer")


def reset_quantization_status(model: Module) -> None:
    """Remove `quantization_status` from all modules of `model`."""
    for module in model.modules():
        if hasattr(module, "quantization_status"):
            delattr(module, "quantization_status")


def _modules(given: Module | Iterable[Module]) -> Iterable[Module]:
    # a ModuleList is a module and an iterable; treat it as the module
    return [given] if isinstance(given, Module) else given
