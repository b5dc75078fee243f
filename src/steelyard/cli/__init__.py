"""The command line: one file per command, and what they share.

Nothing heavy is imported until a command runs: `--help`, `--version` and completion answer at once.
The commands themselves are imported by `main`, when Ctrl-C ends with a line already.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from steelyard.cli.interrupts import interruptible

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command that the program was started with, and exit with its code."""
    try:
        with interruptible():
            from steelyard.cli.app import run

            code = run()
    except KeyboardInterrupt:  # while the commands were imported, or at the very end
        print("error: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
