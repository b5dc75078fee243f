"""The command line: one file per command, and what they share.

Nothing heavy is imported until a command runs: `--help`, `--version` and completion answer at once.
"""

from steelyard.cli.app import main

__all__ = ["main"]
