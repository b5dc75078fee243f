"""`steelyard doctor`: examines a checkpoint as vLLM will read it, and repairs its configuration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.grouping import joined_lines
from steelyard.cli.mistakes import FAILED
from steelyard.cli.terminal import print_document, print_line
from steelyard.cli.validate import coverage, coverage_lines

if TYPE_CHECKING:
    from steelyard.doctor import Examination

__all__ = ["doctor"]

_STYLES = {"error": "red", "warning": "yellow"}


def doctor(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            callback=options.existing_model,
            help="A folder with a model quantized by Steelyard or another tool.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="The original model: decode rows of every weight and compare, and all else.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With --base: decode all rows, not a sample.")
    ] = False,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel", min=1, max=1024, help="Number of processes of the server."
        ),
    ] = 1,
    repair: Annotated[
        Path | None,
        typer.Option(
            "--repair",
            metavar="FOLDER",
            parser=options.output_path,
            help="Write a copy with a config and an index that fit the tensors.",
            show_default=False,
        ),
    ] = None,
    plugins: options.Plugins = None,
    json: options.Json = False,
) -> None:
    """Examine a checkpoint as vLLM will read it.

    Resolves the scheme of every layer by vLLM's rules, and checks all that `steelyard validate`
    checks. Each finding has a severity and a remedy. --repair never changes weights. Exits with 1
    if there is an error; with --repair, if the copy has one.

    \b
    Examples:
      steelyard doctor model-FP8
      steelyard doctor model-FP8 --base path/to/model
      steelyard doctor model-FP8 --tensor-parallel 2 --json
    """
    original = None if base is None else options.existing_model(base)
    if full and original is None:
        raise typer.BadParameter("give the original model too, with --base", param_hint="--full")
    from steelyard.doctor import examine, repair_folder
    from steelyard.engine.progress import progress
    from steelyard.model.model_folder import model_folder

    folder = model_folder(checkpoint)
    origin = None if original is None else model_folder(original)
    changes: list[str] = []
    if repair is not None:
        changes = repair_folder(folder, repair, origin)
        folder = repair
    found = examine(folder, origin, full=full, tensor_parallel=tensor_parallel, watch=progress)
    if json:
        print_document("doctor", _document(folder, origin, found, changes))
    else:
        _print(folder, found, changes if repair is not None else None)
    if found.findings.problems:
        raise typer.Exit(FAILED)


def _document(
    folder: Path, origin: Path | None, found: Examination, changes: list[str]
) -> dict[str, Any]:
    layers: dict[str, list[str]] = {}
    for each in found.served:
        layers.setdefault(each.scheme, []).append(each.layer.name)
    return {
        "checkpoint": str(folder),
        "base": None if origin is None else str(origin),
        "repaired": changes,
        "served": layers,
        "tensor_parallel": found.parallel,
        **coverage(found.findings),
        "findings": [
            {"severity": f.severity, "check": f.check, "text": f.text, "remedy": f.remedy}
            for f in found.findings.found
        ],
        "notes": found.findings.notes,
    }


def _print(folder: Path, found: Examination, changes: list[str] | None) -> None:
    findings = found.findings
    for change in changes or ():
        print_line(f"repaired: {change}")
    if changes is not None and not changes:
        print_line("repaired: nothing, the config and the index fit the tensors")
    for note in findings.notes:
        print_line(f"note: {note}")
    for check in dict.fromkeys(f.check for f in findings.found):
        same = [f for f in findings.found if f.check == check]
        for severity in dict.fromkeys(f.severity for f in same):
            lines = [f"{severity}: {f.text}" for f in same if f.severity == severity]
            print_line(joined_lines("\n".join(lines)), _STYLES[severity])
        print_line(f"  remedy: {same[0].remedy}")
    if found.served:
        counts = Counter(each.scheme for each in found.served)
        served = ", ".join(f"{number} {scheme}" for scheme, number in counts.most_common())
        print_line(f"layers of vLLM: {served}")
        numbers = ", ".join(map(str, found.parallel)) or "none"
        print_line(f"tensor parallelism: {numbers}")
    for line in coverage_lines(findings):
        print_line(line)
    print_line(*_verdict(folder, found))


def _verdict(folder: Path, found: Examination) -> tuple[str, str | None]:
    severities = Counter(finding.severity for finding in found.findings.found)
    if not severities:
        return f"{folder}: no finding, {found.findings.modules} quantized modules", "green"
    listed = ", ".join(
        f"{number} {severity}{'s' if number > 1 else ''}" for severity, number in severities.items()
    )
    return f"{folder}: {listed}", None
