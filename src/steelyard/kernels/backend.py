"""Chooses the implementation: the plain-torch reference, compiled kernels, or Triton's.

`auto`, the default, runs the compiled kernels on fp32, fp16 and bf16 tensors of the CPU, Triton's
on those of a GPU that Triton drives, and the reference on all others. An argument or the
environment variable STEELYARD_BACKEND forces one; STEELYARD_ISA forces one instruction set of the
compiled kernels.

Triton is imported when the first tensor on a GPU arrives, or when it is forced. Its interpreter
(TRITON_INTERPRET=1) runs the kernels on CPU tensors, slowly, and only where it is forced.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "BACKENDS",
    "extension",
    "instruction_set",
    "resolve",
    "triton_device",
    "use_compiled",
    "use_triton",
]

BACKENDS = ("auto", "reference", "compiled", "triton")
_OLDEST_ARCHITECTURE = 80  # of NVIDIA's GPUs that Triton supports


@cache
def extension() -> tuple[ModuleType | None, str | None]:
    """Return the compiled extension, or the reason why there is none."""
    try:
        import steelyard.kernels._native as native
    except ImportError as error:
        return None, str(error)
    return native, None


def resolve(backend: str | None = None) -> str:
    """Return the backend asked for: by argument, else by the environment, else `auto`."""
    source = "backend" if backend is not None else "STEELYARD_BACKEND"
    asked = backend if backend is not None else os.environ.get("STEELYARD_BACKEND", "auto")
    if asked not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {asked!r}")
    return asked


def instruction_set() -> str:
    """Return the build of the compiled kernels: avx512_bf16, avx512, avx2 or baseline."""
    native, _ = extension()
    assert native is not None
    usable: list[str] = native.instruction_sets()
    asked = os.environ.get("STEELYARD_ISA")
    if asked is None:
        return usable[0]
    if asked not in usable:
        raise ValueError(f"STEELYARD_ISA must be one of {', '.join(usable)} here, got {asked!r}")
    return asked


def use_compiled(values: torch.Tensor, backend: str | None = None) -> bool:
    """Whether to run the compiled kernels on `values`."""
    asked = resolve(backend)
    if asked in ("reference", "triton"):
        return False
    reason = _unreadable(values)
    native, problem = extension()
    if native is None:
        reason = f"the extension cannot be imported ({problem})"
        if asked == "auto":
            _notice_missing(reason)
    if asked == "compiled" and reason is not None:
        raise ValueError(f"cannot run the compiled kernels: {reason}")
    return reason is None


@cache
def triton_device() -> tuple[str | None, str | None]:
    """Return the type of device that Triton's kernels run on, or the reason why there is none."""
    try:
        import triton
    except ImportError as error:
        return None, f"Triton cannot be imported ({error}); install steelyard[gpu]"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu", None
    try:
        driver = triton.runtime.driver.active
        target = driver.get_current_target()
        device = str(driver.get_active_torch_device().type)
    except RuntimeError as error:  # no driver, or several
        return None, f"Triton drives no device here ({error})"
    if isinstance(target.arch, int) and target.arch < _OLDEST_ARCHITECTURE:
        return None, f"Triton needs compute capability 8.0 or newer, got {target.arch / 10}"
    return device, None


def use_triton(values: torch.Tensor, backend: str | None = None) -> bool:
    """Whether to run Triton's kernels on `values`."""
    asked = resolve(backend)
    if asked not in ("auto", "triton") or (asked == "auto" and values.device.type == "cpu"):
        return False
    device, reason = triton_device()
    if device is not None and values.device.type != device:
        reason = f"the tensor is on {values.device}, and Triton runs on {device}"
    reason = reason or _wrong_type(values)
    if asked == "triton" and reason is not None:
        raise ValueError(f"cannot run Triton's kernels: {reason}")
    return reason is None


def _unreadable(values: torch.Tensor) -> str | None:
    if values.device.type != "cpu":
        return f"the tensor is on {values.device}, not on the CPU"
    return _wrong_type(values)


def _wrong_type(values: torch.Tensor) -> str | None:
    import torch

    if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the tensor is {values.dtype}, not fp32, fp16 or bf16"
    return None


@cache
def _notice_missing(reason: str) -> None:
    warnings.warn(
        f"steelyard runs on its plain-torch reference, which is slow: {reason}. "
        "Install a C++17 compiler and reinstall the package, or set "
        "STEELYARD_BACKEND=reference to silence this.",
        RuntimeWarning,
        stacklevel=4,
    )
