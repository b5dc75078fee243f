"""`steelyard compare`: compares observers and schemes on the weights of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.atomic_file import FileKind
from steelyard.cli import options, placing
from steelyard.cli.grouping import joined_lines, matching
from steelyard.cli.known import completing, one_of
from steelyard.cli.rank_streams import is_first
from steelyard.cli.recipe import changes_of, ignored_by
from steelyard.cli.terminal import Column, number, print_document, print_line, print_table
from steelyard.errors import ReportError
from steelyard.names import observer_names, scheme_names

if TYPE_CHECKING:
    from steelyard.engine.weight_comparison import Comparison

__all__ = ["compare"]


def compare(
    model: options.Model,
    observers: Annotated[
        str,
        typer.Option(
            "--observers",
            metavar="NAME,NAME",
            autocompletion=completing(observer_names),
            help="Observers for weights.",
        ),
    ] = "memoryless_minmax,memoryless_mse,optimal",
    schemes: Annotated[
        str,
        typer.Option(
            "--schemes",
            metavar="NAME,NAME",
            autocompletion=completing(scheme_names),
            help="Schemes for weights.",
        ),
    ] = "W4A16,NVFP4A16",
    group_size: options.GroupSize = None,
    num_bits: options.NumBits = None,
    ignore: options.Ignore = None,
    filter: options.Filter = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            metavar="N",
            min=1,
            help="Only this many layers, evenly spread over the model.",
            show_default="all",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            parser=options.output_path,
            help="Write the comparison to a file: a page for .html, else JSON.",
            show_default=False,
        ),
    ] = None,
    device: placing.Device = "auto",
    plugins: options.Plugins = None,
    json: options.Json = False,
) -> None:
    """Compare observers and schemes on the weights of a model.

    Each weight is read once. The error is the sum of squared errors of the stored weight over the
    sum of squares of the weight; 10 dB more is a tenth of it. A smaller weight error does not
    always make a better model: quantize with the best few and decide by `steelyard evaluate`.

    \b
    Examples:
      steelyard compare path/to/model --schemes W4A16,NVFP4A16
      steelyard compare path/to/model --schemes FP8_DYNAMIC --filter self_attn --layers 2
    """
    chosen = [one_of("observer", name, observer_names()) for name in _split(observers)]
    stored = [one_of("scheme", name, scheme_names()) for name in _split(schemes)]
    if not chosen or not stored:
        raise typer.BadParameter("name at least one observer and one scheme")
    changes = changes_of(stored, group_size, num_bits)
    keep = matching(filter)
    if report is not None and not report.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {report.parent} for the report; create it")
    if report is not None and is_first():
        try:
            _comparison_file().check_place(report)
        except ReportError as error:
            raise typer.BadParameter(str(error)) from None
    from steelyard.engine import weight_comparison as engine

    found = engine.compare(
        model,
        stored,
        chosen,
        changes=changes,
        ignore=ignored_by(ignore),
        keep=keep,
        layers=layers,
        device=device,
        show_progress=None if is_first() else False,
    )
    if json:
        print_document("compare", found.as_dict())
    else:
        print_comparison(found)
    if report is not None and is_first():
        sys.stdout.flush()
        write_comparison_report(found, report)
        if not json:
            print_line(f"report: {report}")


def _comparison_file() -> FileKind:
    return FileKind("comparison", _is_comparison, ReportError)


def _is_comparison(path: Path) -> bool:
    """Whether `--report` wrote a file."""
    import json

    from steelyard.report import report_at

    page = report_at(path)
    if page is not None:
        return page.comparison is not None and page.summary is None
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("command") == "compare"


def write_comparison_report(comparison: Comparison, path: Path) -> None:
    """Write a comparison to a file: a page for .html, else JSON."""
    if path.suffix.lower() in (".html", ".htm"):
        _comparison_file().write(path, _page(comparison).encode())
        return
    import json

    from steelyard.cli.terminal import SCHEMA

    document = {"schema": SCHEMA, "command": "compare", **comparison.as_dict()}
    _comparison_file().write(path, (json.dumps(document, indent=2) + "\n").encode())


def _page(comparison: Comparison) -> str:
    from steelyard.engine.weight_comparison import layer_of, snr
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
    report = Report(title=comparison.folder.name, comparison=rows, notes=notes)
    return report.to_html()


def print_comparison(comparison: Comparison) -> None:
    from steelyard.engine.weight_comparison import snr

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
            Column("error", True),
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
    refused = {case.scheme: case.refused for case in comparison.cases if case.refused}
    for scheme, reasons in refused.items():
        print_line()
        print_line(f"{scheme} does not fit the model:", style="yellow")
        print_line(joined_lines("\n".join(f"  - {reason}" for reason in reasons)))


def _split(names: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f}"
