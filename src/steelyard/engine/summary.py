"""Summarizes a run in a few lines, for `print(result)` and the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.checkpoint import Shards
from steelyard.engine.block_names import OUTPUT_ERROR, block_errors
from steelyard.foreign import printable
from steelyard.model.module_names import grouped
from steelyard.words import count, duration, number, size, table_lines

if TYPE_CHECKING:
    from steelyard.engine.result import Result

__all__ = ["error_table", "report_in", "stored_bytes", "summary", "summary_lines"]


def summary(result: Result) -> str:
    """Return a table of errors, followed by `summary_lines`."""
    titles, rows = error_table(result)
    lines = [*table_lines(titles, rows), ""] if rows else []
    return printable("\n".join([*lines, *summary_lines(result)]), keep="\n")


def error_table(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows of a table, a row for modules of the same name by layer.

    With output errors, those come first, in decibels, and the worst row is the first. All columns
    but the first hold numbers.
    """
    schemes = {p.name: id(p.scheme) for p in result.plan.quantized}
    names = [name for name in result.modules if name in schemes]
    groups = list(grouped(names, str, lambda name: schemes[name]))
    weights = {
        label: _middle_and_worst(result.modules[n].error for n in members)
        for label, members in groups
    }
    outputs = {
        label: _middle_and_worst(result.modules[n].details.get(OUTPUT_ERROR) for n in members)
        for label, members in groups
    }
    if all(worst is None for _, worst in outputs.values()):
        titles = ["modules", "count", "error", "worst"]
        return titles, [
            [label, str(len(members)), *map(number, weights[label])] for label, members in groups
        ]
    titles = ["modules", "count", "output SNR, dB", "worst", "weight error", "worst"]
    groups.sort(key=lambda group: -(outputs[group[0]][1] or 0.0))
    return titles, [
        [label, str(len(members)), *map(_decibels, outputs[label]), *map(number, weights[label])]
        for label, members in groups
    ]


def _middle_and_worst(errors: Iterable[float | None]) -> tuple[float | None, float | None]:
    known = sorted(error for error in errors if error is not None)
    return (known[len(known) // 2], known[-1]) if known else (None, None)


def _decibels(error: float | None) -> str:
    return "-" if error is None else f"{-10 * math.log10(error):.1f}" if error else "exact"


def summary_lines(result: Result, said: Sequence[str] = ()) -> list[str]:
    """Return sizes, skipped modules, warnings, notes, and the paths of the results.

    said: warnings already shown
    """
    plan = result.plan
    before, after = plan.source_bytes, stored_bytes(result)
    ratio = f", {before / after:.1f} times smaller" if after else ""
    attention = f" and {count(len(plan.attention), 'attention module')}" if plan.attention else ""
    lines = [
        f"{count(len(result.modules), 'module')}{attention} quantized in "
        f"{duration(result.seconds, digits=1)}: {size(before)} -> {size(after)}{ratio}"
    ]
    if blocks := block_errors(result.modules):
        worst = max(blocks, key=lambda name: blocks[name])
        decibel = _decibels(blocks[worst])
        lines.append(f"block with the largest output error: {worst}, {decibel} dB")
    for reason in dict.fromkeys(left.reason for left in plan.left):
        names = [left.name for left in plan.left if left.reason == reason]
        labels = [label for label, _ in grouped(names, str, lambda _: None)]
        lines.append(f"not quantized: {', '.join(labels)} ({reason})")
    lines += [f"warning: {warning}" for warning in result.warnings if warning not in said]
    lines += [f"note: {note}" for note in result.notes if note not in result.warnings]
    if result.output_dir is not None:
        lines.append(f"checkpoint: {result.output_dir}")
    if (report := report_in(result.output_dir)) is not None:
        lines.append(f"report: {report}")
    return lines


def report_in(folder: Path | None) -> Path | None:
    """Return the path of a run's report: the page, else the JSON file."""
    names = ("report.html", "report.json")
    found = (folder / name for name in names) if folder is not None else ()
    return next((path for path in found if path.is_file()), None)


def stored_bytes(result: Result) -> int:
    """Return the bytes of all tensors written, or to be written."""
    if result.output_dir is None or not result.output_dir.is_dir():
        return 0 if result.plan.errors else result.plan.output_bytes
    with Shards(result.output_dir) as shards:
        return shards.total_bytes
