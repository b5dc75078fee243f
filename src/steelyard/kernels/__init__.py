"""The mathematics of quantization as pure functions, free of modules, sessions and globals.

Each function here is written first in plain torch. That reference defines the answer: it is short
enough to check by eye and runs on any device. The extension `steelyard.kernels._native` has faster,
compiled versions for the CPU, and the files `triton_*` have versions for GPUs; both are tested
against the reference. `info()` returns which is in use.
"""

from __future__ import annotations

from steelyard.kernels.backend import extension, instruction_set, resolve

__all__ = ["info"]


def info() -> dict[str, object]:
    """Return which backend runs the kernels, how it was compiled, and what the CPU supports.

    `backend` runs fp32, fp16 and bf16 tensors on the CPU; Triton's kernels run those on a GPU that
    Triton drives, and the reference runs everything else.
    Where the extension cannot be imported, `extension_error` says why.

    >>> info()  # doctest: +SKIP
    {'backend': 'compiled', 'extension': True, 'extension_error': None, 'compiler': 'gcc 12.2.0',
     'instruction_set': 'avx512_bf16',
     'instruction_sets': ['avx512_bf16', 'avx512', 'avx2', 'baseline'],
     'cpu_features': ['avx2', 'fma', 'avx512f', 'avx512bw', 'avx512vl', 'avx512_bf16']}
    """
    native, error = extension()
    asked = resolve()
    compiled = native is not None and asked not in ("reference", "triton")
    return {
        "backend": "compiled" if compiled else "triton" if asked == "triton" else "reference",
        "extension": native is not None,
        "extension_error": error,
        "compiler": native.compiler() if native is not None else None,
        "instruction_set": instruction_set() if compiled else None,
        "instruction_sets": native.instruction_sets() if native is not None else [],
        "cpu_features": native.cpu_features() if native is not None else [],
    }
