"""`steelyard compare`: compares observers on a model's weights, or checkpoints on text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.atomic_file import FileKind
from steelyard.cli import options
from steelyard.cli.compare_checkpoints import checkpoints_page, print_checkpoints
from steelyard.cli.compare_observers import comparison_page, print_comparison
from steelyard.cli.evaluate import Limit
from steelyard.cli.grouping import matching
from steelyard.cli.known import completing, one_of
from steelyard.cli.rank_streams import is_first
from steelyard.cli.recipe import changes_of, ignored_by
from steelyard.cli.terminal import SCHEMA, print_document, print_line
from steelyard.data.file_names import data_file
from steelyard.errors import ReportError
from steelyard.names import observer_names, scheme_names

if TYPE_CHECKING:
    from steelyard.engine.compared_weights import Comparison
    from steelyard.evaluate.checkpoint_comparison import CheckpointComparison

__all__ = ["compare"]

OBSERVERS = "memoryless_minmax,memoryless_mse,optimal"
SCHEMES = "W4A16,NVFP4A16"


def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            callback=lambda names: [options.existing_model(name) for name in names],
            help="A model, to compare observers on its weights; or with --base, checkpoints.",
            show_default=False,
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            callback=lambda name: name if name is None else options.existing_model(name),
            help="The original model of the checkpoints to compare; needs --data.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Text to compare on; files as for quantize. For checkpoints: held-out data.",
            show_default=False,
        ),
    ] = None,
    samples: options.Samples = 128,
    max_seq_length: options.MaxSeqLength = 2048,
    batch_size: options.BatchSize = 1,
    text_column: options.TextColumn = "text",
    split: options.Split = None,
    seed: options.Seed = 0,
    limit: Limit = None,
    observers: Annotated[
        str | None,
        typer.Option(
            "--observers",
            metavar="NAME,NAME",
            autocompletion=completing(observer_names),
            help="Observers for weights.",
            show_default=OBSERVERS,
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            "--schemes",
            metavar="NAME,NAME",
            autocompletion=completing(scheme_names),
            help="Schemes for weights.",
            show_default=SCHEMES,
        ),
    ] = None,
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
            "--output",
            "-o",
            "--report",
            metavar="FILE",
            parser=options.output_path,
            help="Write the comparison to a file: a page for .html, else JSON.",
            show_default=False,
        ),
    ] = None,
    device: options.Device = "auto",
    plugins: options.Plugins = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Compare checkpoints of a model, or observers on its weights.

    With --base, all checkpoints run on the same held-out text: size against KL divergence. They may
    come from any tool that writes compressed-tensors. The original runs once.

    Without, each weight is quantized in every scheme by every observer. With --data, the error is
    that of the module's output: squared, over the square of the output. Without --data it is that
    of the weight, which does not always follow: then decide by checkpoints.

    \b
    Examples:
      steelyard compare model-W4A16 model-GPTQ --base path/to/model --data held-out.txt -o both.html
      steelyard compare path/to/model --schemes W4A16,NVFP4A16 --data calibration.txt --samples 16
      steelyard compare path/to/model --schemes FP8_DYNAMIC --filter self_attn --layers 2
    """
    of_observers = {
        "--observers": observers,
        "--schemes": schemes,
        "--group-size": group_size,
        "--num-bits": num_bits,
        "--ignore": ignore,
        "--filter": filter,
        "--layers": layers,
    }
    given = [name for name, value in of_observers.items() if value is not None]
    if base is not None and given:
        raise typer.BadParameter(f"{given[0]} compares observers, and --base checkpoints")
    if base is None and len(models) > 1:
        raise typer.BadParameter("--base is missing: several checkpoints need their original model")
    if base is None and limit:
        raise typer.BadParameter("--limit is of the verdict on checkpoints, which needs --base")
    if base is not None and data is None:
        raise typer.BadParameter("--data is missing: checkpoints are compared on held-out text")
    if data is not None:
        data_file(data)  # before imports that take seconds
    _check_place(report)
    reading: dict[str, Any] = {
        "num_samples": samples,
        "max_seq_length": max_seq_length,
        "batch_size": batch_size,
        "text_column": text_column,
        "split": split,
        "seed": seed,
        "device": device,
        "trust_remote_code_model": trust_remote_code,
        "show_progress": None if is_first() else False,
    }
    if base is not None:
        from steelyard.evaluate import Limits
        from steelyard.evaluate.checkpoint_comparison import compare_checkpoints

        limits = Limits.parse(limit or [])
        reading["show_progress"] = is_first()  # lines in a log, too
        compared = compare_checkpoints(base, models, data, limits=limits, **reading)
        _finish(
            compared,
            print_checkpoints,
            lambda: checkpoints_page(compared, report or Path()),
            report,
            json,
        )
    else:
        chosen = [one_of("observer", n, observer_names()) for n in _split(observers or OBSERVERS)]
        stored = [one_of("scheme", n, scheme_names()) for n in _split(schemes or SCHEMES)]
        if not chosen or not stored:
            raise typer.BadParameter("name at least one observer and one scheme")
        changes = changes_of(stored, group_size, num_bits)
        keep = matching(filter)
        from steelyard.engine import weight_comparison as engine

        found = engine.compare(
            models[0],
            stored,
            chosen,
            changes=changes,
            ignore=ignored_by(ignore),
            keep=keep,
            layers=layers,
            data=data,
            **reading,
        )
        _finish(found, print_comparison, lambda: comparison_page(found), report, json)


def _check_place(report: Path | None) -> None:
    """Refuse, before any work, a report that cannot be written."""
    if report is not None and not report.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {report.parent} for the report; create it")
    if report is not None and is_first():
        try:
            _comparison_file().check_place(report)
        except ReportError as error:
            raise typer.BadParameter(str(error)) from None


def _finish(
    found: Any,
    show: Callable[[Any], None],
    page: Callable[[], str],
    report: Path | None,
    json: bool,
) -> None:
    """Print a comparison, and write it to a file."""
    if json:
        print_document("compare", found.as_dict())
    else:
        show(found)
    if report is not None and is_first():
        sys.stdout.flush()
        _write(found, page, report)
        if not json:
            print_line(f"report: {report}")


def _comparison_file() -> FileKind:
    return FileKind("comparison", _is_comparison, ReportError)


def _is_comparison(path: Path) -> bool:
    """Whether `--output` wrote a file."""
    import json

    from steelyard.report import report_at

    page = report_at(path)
    if page is not None:
        return page.summary is None and (page.comparison is not None or bool(page.checkpoints))
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("command") == "compare"


def _write(found: Comparison | CheckpointComparison, page: Callable[[], str], path: Path) -> None:
    """Write a comparison to a file: a page for .html, else JSON."""
    if path.suffix.lower() in (".html", ".htm"):
        _comparison_file().write(path, page().encode())
        return
    import json

    document = {"schema": SCHEMA, "command": "compare", **found.as_dict()}
    _comparison_file().write(path, (json.dumps(document, indent=2) + "\n").encode())


def _split(names: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
