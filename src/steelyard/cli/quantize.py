"""`steelyard quantize`: from a model and a scheme or recipe to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.grouping import grouped
from steelyard.cli.mistakes import USAGE, Interrupted, in_options
from steelyard.cli.ranks import is_first, join
from steelyard.cli.recipe import recipe_from
from steelyard.cli.terminal import (
    Column,
    duration,
    number,
    print_document,
    print_line,
    print_table,
    size,
)

if TYPE_CHECKING:
    from steelyard.pipelines.result import Result

__all__ = ["quantize"]


def quantize(
    model: options.Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            parser=options.output_path,
            help="Where the checkpoint goes.",
            show_default=False,
        ),
    ] = None,
    scheme: options.SchemeName = None,
    observer: options.ObserverName = None,
    recipe: options.RecipeFile = None,
    data: options.Data = None,
    ignore: options.Ignore = None,
    targets: options.Targets = None,
    gptq: options.Gptq = False,
    group_size: options.GroupSize = None,
    samples: options.Samples = 512,
    max_seq_length: options.MaxSeqLength = 2048,
    batch_size: options.BatchSize = 1,
    seed: options.Seed = 0,
    text_column: options.TextColumn = "text",
    tokenizer: options.Tokenizer = None,
    pipeline: options.Pipeline = "auto",
    uncalibrated: options.Uncalibrated = "error",
    statistics: Annotated[
        str | None,
        typer.Option(
            "--statistics",
            metavar="FILE",
            help="What `steelyard observe` saved, instead of --data.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Take up a run that did not end, or start anew."),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model brings.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Quantize a model, and write a checkpoint that vLLM serves.

    The plan is printed first: what is quantized, what is left and why, and how large the result
    will be. A run that was stopped goes on where it was when the same command is given again.
    With --data, the columns of a weight count by what flows into them.

    \b
    Examples:
      steelyard quantize path/to/model -o model-FP8 --scheme FP8_DYNAMIC
      steelyard quantize path/to/model --scheme W4A16 --dry-run
      steelyard quantize path/to/model -o model-INT4 --scheme W4A16 --data calibration.txt
      steelyard quantize path/to/model -o model-GPTQ --scheme W4A16 --gptq --data calibration.txt
      steelyard quantize path/to/model -o model-NVFP4 --recipe recipe.yaml --data calibration.txt
    """
    made = recipe_from(
        scheme, recipe, observer, ignore, targets, gptq, group_size, weigh=data is not None
    )
    if output is None and not dry_run:
        raise typer.BadParameter("-o is missing: where should the checkpoint go?")
    if statistics is not None and data is not None:
        raise typer.BadParameter("--statistics and --data exclude each other")
    from steelyard.entry import oneshot
    from steelyard.recipes import load_recipe

    if data is None and statistics is None and not dry_run and load_recipe(made).needs_data:
        raise typer.BadParameter(
            "--data is missing: static activations, importance and GPTQ need calibration data"
        )
    join()
    try:
        result = oneshot(
            model,
            made,
            data,
            output,
            tokenizer=tokenizer,
            num_calibration_samples=samples,
            max_seq_length=max_seq_length,
            batch_size=batch_size,
            text_column=text_column,
            seed=seed,
            pipeline=pipeline,
            uncalibrated=uncalibrated,
            overwrite=overwrite,
            resume=resume,
            dry_run=dry_run,
            trust_remote_code_model=trust_remote_code,
            statistics=statistics,
            show_progress=is_first() and not dry_run,
        )
    except KeyboardInterrupt:
        raise Interrupted("the same command takes the run up where it was") from None
    if json:
        print_document("quantize", as_document(result))
    elif dry_run:
        print_line(in_options(str(result.plan)))
    else:
        print_summary(result)
    if dry_run and result.plan.errors:
        raise typer.Exit(USAGE)


def as_document(result: Result) -> dict[str, Any]:
    """Return what a run did, in JSON's types."""
    plan, folder = result.plan, result.output_dir
    before, after = plan.source_bytes, _stored_bytes(result)
    return {
        "output": None if folder is None else str(folder),
        "report": None if (report := report_in(folder)) is None else str(report),
        "modules": {
            name: {"error": m.error, "tokens": m.tokens, "details": _without_figures(m.details)}
            for name, m in result.modules.items()
        },
        "quantized": [{"name": p.name, "shape": p.shape, "group": p.group} for p in plan.quantized],
        "left": [{"name": each.name, "reason": each.reason} for each in plan.left],
        "source_bytes": before,
        "output_bytes": after,
        "ratio": before / after if after else None,
        "seconds": result.seconds,
        "notes": result.notes,
        "warnings": [in_options(warning) for warning in plan.warnings],
        "errors": [in_options(error) for error in plan.errors],
    }


def _without_figures(details: dict[str, Any]) -> dict[str, Any]:
    """Return what an algorithm tells; the report has the figures."""
    return {name: value for name, value in details.items() if name != "figures"}


def print_summary(result: Result) -> None:
    """Print what a run did, over a few lines."""
    plan, folder = result.plan, result.output_dir
    formats = {p.name: p.scheme for p in plan.quantized}
    errors = {name: m.error for name, m in result.modules.items()}
    rows = []
    for label, members in grouped(
        [name for name in errors if name in formats], str, lambda n: id(formats[n])
    ):
        known = sorted(e for n in members if (e := errors[n]) is not None)
        middle = known[len(known) // 2] if known else None
        rows.append(
            [label, str(len(members)), number(middle), number(known[-1] if known else None)]
        )
    print_table(
        [
            Column("modules"),
            Column("count", True),
            Column("error", True),
            Column("worst", True),
        ],
        rows,
    )
    print_line()
    before, after = plan.source_bytes, _stored_bytes(result)
    ratio = f", {before / after:.1f} times smaller" if after else ""
    print_line(
        f"{len(result.modules)} modules quantized in {duration(result.seconds)}: "
        f"{size(before)} -> {size(after)}{ratio}"
    )
    for reason in dict.fromkeys(left.reason for left in plan.left):
        names = [left.name for left in plan.left if left.reason == reason]
        labels = [label for label, _ in grouped(names, str, lambda _: None)]
        print_line(f"left as it was: {', '.join(labels)} ({reason})")
    for note in result.notes:
        if note not in plan.warnings:  # which the plan has said
            print_line(f"note: {note}")
    if folder is not None:
        print_line(f"checkpoint: {folder}", style="bold green")
    if (report := report_in(folder)) is not None:
        print_line(f"report: {report}")


def report_in(folder: Path | None) -> Path | None:
    """Return the report of a run, as a page or else as data."""
    names = ("report.html", "report.json")
    found = (folder / name for name in names) if folder is not None else ()
    return next((path for path in found if path.is_file()), None)


def _stored_bytes(result: Result) -> int:
    from steelyard.checkpoint import Shards

    if result.output_dir is None:
        return 0 if result.plan.errors else result.plan.output_bytes
    with Shards(result.output_dir) as shards:
        return shards.total_bytes
