"""`steelyard merge`: merges the statistics of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import options
from steelyard.cli.rank_streams import is_first
from steelyard.cli.terminal import print_document, print_line, size
from steelyard.words import count

__all__ = ["merge"]


def merge(
    statistics: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files that `steelyard observe` saved, in order."),
    ],
    output: options.OutputFile,
    plugins: options.Plugins = None,
    json: options.Json = False,
) -> None:
    """Merge the statistics of several runs into one file.

    The result equals the statistics of one run over all their data, in the order of the files. Each
    part of the data counts once, so a file that is given twice is refused.

    \b
    Example:
      steelyard merge statistics.safetensors more.safetensors -o all.safetensors
    """
    for path in statistics:
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {path}")
    from steelyard.engine.statistics import merge_statistics

    if not is_first():  # one rank writes
        return
    merge_statistics(statistics, output)
    if json:
        print_document(
            "merge", {"inputs": [str(path) for path in statistics], "output": str(output)}
        )
        return
    print_line(f"{output}: {count(len(statistics), 'file')} merged, {size(output.stat().st_size)}")
