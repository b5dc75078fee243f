"""Identifies the kind of processor that a run computes on.

The instruction set decides the order of additions in matrix products, so hidden states, and weights
that are rounded with them, differ in their last bits between processors. A data-free run rounds
each weight by itself and gives the same bytes on every processor.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from steelyard import kernels

__all__ = ["processor"]

_VECTORS = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")


def processor() -> dict[str, str]:
    """Return the properties that select the code paths of torch and of the compiled kernels."""
    known = _cpuinfo()
    flags = (known.get("flags") or known.get("Features") or "").split()
    found = kernels.info()
    return {
        "machine": platform.machine(),
        "vendor": known.get("vendor_id") or known.get("CPU implementer") or "unknown",
        "instructions": " ".join(sorted(flag for flag in flags if flag.startswith(_VECTORS))),
        "torch": torch.backends.cpu.get_cpu_capability(),
        "kernels": f"{found['backend']} {found['instruction_set'] or ''}".strip(),
    }


def _cpuinfo() -> dict[str, str]:
    """Return the first entry of /proc/cpuinfo; empty on other systems than Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
