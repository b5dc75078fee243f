"""The kind of processor that a run computes on.

Sums of products are added in another order where the instructions differ, so hidden states, and
weights that are rounded with them, come out with other bits. A run without calibration data
rounds each weight by itself, and gives the same bytes on every processor.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from steelyard import kernels

__all__ = ["processor"]

_VECTORS = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")


def processor() -> dict[str, str]:
    """Return, by name, what decides which code torch and the compiled kernels run."""
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
    """Return what Linux tells of the first processor; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
