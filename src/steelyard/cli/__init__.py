"""The command line: one file per command, and shared options and output.

Nothing heavy is imported until a command runs, so `--help`, `--version` and completion are quick.
`main` imports the commands once Ctrl-C is handled.
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
    except KeyboardInterrupt:  # during the imports, or at exit
        print("error: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
