"""Prints comparisons of observers, and writes them to files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard.cli.grouping import joined_lines
from steelyard.cli.terminal import Column, number, print_line, print_table
from steelyard.words import count

if TYPE_CHECKING:
    from steelyard.engine.compared_weights import Comparison

__all__ = ["comparison_page", "print_comparison"]


def comparison_page(comparison: Comparison) -> str:
    """Return a comparison as a page."""
    from steelyard.engine.compared_weights import layer_of, snr
    from steelyard.report import ComparisonRow, Report

    layers = {
        int(place.rpartition(".")[2]): names
        for layer, names in comparison.layers().items()
        if (place := layer_of(layer)) is not None
    }
    depths = range(max(layers, default=-1) + 1)
    cases = [case for case in comparison.cases if not case.refused]
    rows = [
        ComparisonRow(
            scheme=case.scheme,
            observer=case.observer,
            bytes=case.stored_bytes,
            bits_per_weight=case.bits_per_weight,
            error=(error := comparison.error(case)),
            snr=snr(error),
            layers=[
                comparison.error(case, layers[depth]) if depth in layers else None
                for depth in depths
            ],
            seconds=case.seconds,
        )
        for case in cases
    ]
    refused = {case.scheme: case.refused for case in comparison.cases if case.refused}
    notes = [f"{scheme} does not fit: {reasons[0]}" for scheme, reasons in refused.items()]
    notes = [*_about(comparison), *notes]
    report = Report(title=comparison.folder.name, comparison=rows, notes=notes)
    return report.to_html()


def print_comparison(comparison: Comparison) -> None:
    from steelyard.engine.compared_weights import snr

    cases = [case for case in comparison.cases if not case.refused]
    letters = {case.label: _letter(i) for i, case in enumerate(cases)}
    rows = []
    for case in cases:
        error = comparison.error(case)
        worst = max(case.errors, key=lambda name: case.errors[name])
        rows.append(
            [
                letters[case.label],
                case.scheme,
                case.observer,
                f"{case.bits_per_weight:.2f}",
                number(error),
                _decibels(snr(error)),
                number(case.errors[worst]),
                f"{case.seconds:.1f} s",
            ]
        )
    print_table(
        [
            Column(""),
            Column("scheme"),
            Column("observer"),
            Column("bits", True),
            Column("error" if comparison.data is None else "output error", True),
            Column("SNR dB", True),
            Column("worst", True),
            Column("time", True),
        ],
        rows,
    )
    layers = comparison.layers()
    if len(layers) > 1:
        print_line()
        print_table(
            [Column("SNR in dB"), *(Column(letters[case.label], True) for case in cases)],
            [
                [
                    layer,
                    *(_decibels(snr(comparison.error(case, names))) for case in cases),
                ]
                for layer, names in layers.items()
            ],
        )
    if comparison.data is not None:
        print_line()
    for note in _about(comparison):
        print_line(note)
    refused = {case.scheme: case.refused for case in comparison.cases if case.refused}
    for scheme, reasons in refused.items():
        print_line()
        print_line(f"{scheme} does not fit the model:", style="yellow")
        print_line(joined_lines("\n".join(f"  - {reason}" for reason in reasons)))


def _about(comparison: Comparison) -> list[str]:
    """Return what errors with data are, and the modules that have none."""
    if comparison.data is None:
        return []
    found = [f"errors of outputs, on {comparison.data}"]
    if comparison.unseen:
        found.append(
            f"not compared: {count(len(comparison.unseen), 'module')} that no token reaches, such "
            f"as {comparison.unseen[0]}"
        )
    return found


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f}"
