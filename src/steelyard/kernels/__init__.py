"""The mathematics of quantization as pure functions, free of modules, sessions and globals.

Each function here is written first in plain torch. That reference defines the answer: it is short
enough to check by eye and runs on any device. Compiled versions stand beside it, in the extension
`steelyard.kernels._native`, and may be faster but never different. Which of the two is in use is
no secret: ask `info()`.
"""

from __future__ import annotations

__all__ = ["info"]


def info() -> dict[str, object]:
    """Return which backend runs the kernels, and what the compiled extension knows of this machine.

    `backend` is always "reference" for now: the extension holds no kernels yet. Where the
    extension cannot be imported, `extension_error` says why and the rest is empty.

    >>> info()  # doctest: +SKIP
    {'backend': 'reference', 'extension': True, 'extension_error': None,
     'compiler': 'gcc 12.2.0', 'cpu_features': ['avx2', 'fma']}
    """
    try:
        import steelyard.kernels._native as native
    except ImportError as error:
        return {
            "backend": "reference",
            "extension": False,
            "extension_error": str(error),
            "compiler": None,
            "cpu_features": [],
        }
    return {
        "backend": "reference",
        "extension": True,
        "extension_error": None,
        "compiler": native.compiler(),
        "cpu_features": native.cpu_features(),
    }
