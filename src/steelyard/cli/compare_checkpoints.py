"""Prints comparisons of checkpoints, and makes their page."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from steelyard.cli.terminal import Column, number, print_line, print_table, size

if TYPE_CHECKING:
    from steelyard.evaluate.checkpoint_comparison import CheckpointComparison, ComparedCheckpoint

__all__ = ["checkpoints_page", "print_checkpoints"]


def print_checkpoints(found: CheckpointComparison) -> None:
    """Print a table, the closest to the original first."""
    columns = [Column("checkpoint"), Column("scheme"), Column("size", True), Column("bits", True)]
    columns += [
        Column("KL", True),
        Column("+-", True),
        Column("behind", True),
        Column("KL p99", True),
    ]
    columns += [Column("perplexity", True), Column("top-1", True), Column("verdict")]
    print_table(columns, [_cells(each, i == 0) for i, each in enumerate(found.checkpoints)])
    print_line()
    first = found.checkpoints[0].evaluation
    print_line(
        f"{found.base}: {size(found.base_bytes)}, perplexity {first.base_perplexity:.3f}, over "
        f"{first.tokens:,} tokens"
    )
    for each in found.checkpoints:
        for note in each.evaluation.notes[1:]:
            print_line(f"note: {each.name}: {note}")
    for each in found.checkpoints:
        if each.report is not None:
            print_line(f"report of {each.name}: {each.report}")


def _cells(each: ComparedCheckpoint, closest: bool) -> list[str]:
    found = each.evaluation
    more = "closest" if closest else "noise" if each.within_noise else f"+{number(each.behind)}"
    return [
        each.name,
        _schemes(each),
        size(each.nbytes),
        "-" if each.bits_per_weight is None else f"{each.bits_per_weight:.2f}",
        number(found.kl_divergence),
        "-" if found.kl_error is None else number(found.kl_error, 2),
        more,
        number(found.kl_p99),
        f"{100 * found.perplexity_change:+.1f} %",
        f"{100 * found.top1_agreement:.1f} %",
        each.verdict.word,
    ]


def _schemes(each: ComparedCheckpoint) -> str:
    """Return the scheme, or several with their numbers of weights."""
    if len(each.schemes) == 1:
        return next(iter(each.schemes))
    return ", ".join(f"{n} {label}" for label, n in each.schemes.items()) or "unquantized"


def checkpoints_page(found: CheckpointComparison, page: Path) -> str:
    """Return a comparison as a page, with links to the reports of the checkpoints.

    page: where it will be
    """
    from steelyard.report import CheckpointRow, Report

    rows = [
        CheckpointRow(
            name=each.name,
            schemes=_schemes(each),
            bytes=each.nbytes,
            bits_per_weight=each.bits_per_weight,
            kl_divergence=each.evaluation.kl_divergence,
            kl_error=each.evaluation.kl_error,
            kl_p99=each.evaluation.kl_p99,
            perplexity_change=change if math.isfinite(change) else None,
            top1_agreement=each.evaluation.top1_agreement,
            verdict=each.verdict.word,
            behind=each.behind,
            within_noise=each.within_noise,
            smallest=each.smallest,
            link=_link(each.report, page),
        )
        for each in found.checkpoints
        for change in [each.evaluation.perplexity_change]
    ]
    first = found.checkpoints[0].evaluation
    notes = [
        f"{found.base}: {size(found.base_bytes)}, perplexity {first.base_perplexity:.3f}",
        *dict.fromkeys(note for each in found.checkpoints for note in each.evaluation.notes),
    ]
    title = f"Checkpoints of {Path(found.base).name}"
    return Report(title=title, checkpoints=rows, notes=notes).to_html()


def _link(report: Path | None, page: Path) -> str | None:
    """Return the address of a report relative to a page."""
    if report is None:
        return None
    path = Path(os.path.relpath(report.resolve(), page.resolve().parent))
    return quote(path.as_posix())
