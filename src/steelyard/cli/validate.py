"""`steelyard validate`: checks a checkpoint against its own config and its source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.grouping import joined_lines
from steelyard.cli.mistakes import FAILED
from steelyard.cli.terminal import print_document, print_line, size

if TYPE_CHECKING:
    from steelyard.checkpoint import Findings

__all__ = ["coverage", "coverage_lines", "validate"]


def validate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            callback=options.existing_model,
            help="A folder with a quantized model.",
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="MODEL",
            help="The original model: decode and compare weights, compare all else byte by byte.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="With --source: decode all rows of all weights, not a sample."),
    ] = False,
    plugins: options.Plugins = None,
    json: options.Json = False,
) -> None:
    """Check that a checkpoint matches its config.

    Every tensor must have its type and shape, and every scale must be usable: a server loads a
    checkpoint that lacks a scale without a warning. Every file must have the digest that the run
    wrote to provenance.json. Exits with 1 if there is a problem. `steelyard doctor` checks more.

    \b
    Examples:
      steelyard validate model-FP8
      steelyard validate model-FP8 --source path/to/model
      steelyard validate model-FP8 --source path/to/model --full
    """
    original = None if source is None else options.existing_model(source)
    if full and original is None:
        raise typer.BadParameter("give the original model too, with --source", param_hint="--full")
    from steelyard.doctor import validate_folder
    from steelyard.engine.progress import progress
    from steelyard.model.model_folder import model_folder

    folder = model_folder(checkpoint)
    origin = None if original is None else model_folder(original)
    found = validate_folder(folder, origin, full, progress)
    if json:
        print_document("validate", _document(folder, origin, found))
    else:
        _print(folder, origin, found)
    if found.problems:
        raise typer.Exit(FAILED)


def _document(folder: Path, origin: Path | None, found: Findings) -> dict[str, Any]:
    return {
        "checkpoint": str(folder),
        "source": None if origin is None else str(origin),
        **coverage(found),
        "notes": found.notes,
        "problems": found.problems,
    }


def coverage(found: Findings) -> dict[str, Any]:
    """Return how much was checked, as JSON types."""
    rows, digests = found.rows, found.digests
    return {
        "modules": found.modules,
        "decoded": None if rows is None else {"rows": rows.rows, "of": rows.total},
        "digests": None if digests is None else {"files": digests.files, "bytes": digests.bytes},
    }


def _print(folder: Path, origin: Path | None, found: Findings) -> None:
    for note in found.notes:
        print_line(f"note: {note}")
    if found.problems:
        problems = [f"problem: {each}" for each in found.problems]
        print_line(joined_lines("\n".join(problems)), style="red")
        print_line()
    for line in coverage_lines(found):
        print_line(line)
    if found.problems:
        count = len(found.problems)
        print_line(f"{count} problem{'s' if count > 1 else ''} in {folder}")
        return
    against = f", against {origin}" if origin is not None else ""
    print_line(f"{folder} is valid: {found.modules} quantized modules checked{against}", "green")


def coverage_lines(found: Findings) -> Iterator[str]:
    """Yield lines on how much was checked."""
    if found.digests is not None:
        count = f"{found.digests.files:,} files, {size(found.digests.bytes)}"
        yield f"compared digests of {count}"
    if found.rows is not None and found.rows.total:
        rows, total = found.rows.rows, found.rows.total
        some = f"decoded {rows:,} of {total:,} rows; --full decodes all"
        yield f"decoded all {total:,} rows of quantized weights" if rows == total else some
