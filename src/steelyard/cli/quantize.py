"""`steelyard quantize`: from a model and a scheme or recipe to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import budget, options, placing
from steelyard.cli.evaluate import add_to_report, print_study
from steelyard.cli.mistakes import USAGE, Interrupted, in_options
from steelyard.cli.rank_streams import is_first, join
from steelyard.cli.recipe import recipe_from
from steelyard.cli.terminal import (
    Column,
    print_document,
    print_line,
    print_table,
)
from steelyard.collector import paused
from steelyard.data.file_names import data_file
from steelyard.engine.announce import STYLES

if TYPE_CHECKING:
    from steelyard.engine.result import Result
    from steelyard.evaluate import Study

__all__ = ["quantize"]

LINE_STYLES = {**STYLES, "checkpoint": "bold green"}


def quantize(
    model: options.Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            parser=options.output_path,
            help="Folder for the checkpoint.",
            show_default=False,
        ),
    ] = None,
    scheme: options.SchemeName = None,
    observer: options.ObserverName = None,
    recipe: options.RecipeFile = None,
    plugins: options.Plugins = None,
    data: options.Data = None,
    ignore: options.Ignore = None,
    targets: options.Targets = None,
    gptq: options.Gptq = False,
    group_size: options.GroupSize = None,
    num_bits: options.NumBits = None,
    bits: budget.Bits = None,
    max_kl: budget.MaxKl = None,
    bit_widths: budget.BitWidths = None,
    samples: options.Samples = 512,
    max_seq_length: options.MaxSeqLength = 2048,
    batch_size: options.BatchSize = 1,
    seed: options.Seed = 0,
    text_column: options.TextColumn = "text",
    split: options.Split = None,
    tokenizer: options.Tokenizer = None,
    device: placing.Device = "auto",
    activations: placing.Activations = "auto",
    pipeline: options.Pipeline = "auto",
    uncalibrated: options.Uncalibrated = "error",
    uncalibratable: options.Uncalibratable = "note",
    statistics: Annotated[
        str | None,
        typer.Option(
            "--statistics",
            metavar="FILE",
            help="Statistics file of `steelyard observe`, instead of --data.",
            show_default=False,
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="FILE",
            help="Held-out data: then compare the checkpoint with the model on it, as `steelyard "
            "evaluate` does, and add the verdict to the report.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Resume an unfinished run, or start over."),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Quantize a model, and write a checkpoint that vLLM serves.

    Prints the plan first: which modules are quantized, which are not and why, and the size of the
    result. The same command resumes a run that was stopped. With --data, errors in a column of a
    weight are weighted by the mean square of its input. With --evaluate, says whether to ship it.

    \b
    Examples:
      steelyard quantize path/to/model -o model-FP8 --scheme FP8_DYNAMIC
      steelyard quantize path/to/model --scheme W4A16 --dry-run
      steelyard quantize path/to/model -o model-INT4 --scheme W4A16 --data calibration.txt
      steelyard quantize path/to/model -o model-GPTQ --scheme W4A16 --gptq --data calibration.txt
      steelyard quantize path/to/model -o model-4.5 --bits 4.5 --gptq --data calibration.txt
      steelyard quantize path/to/model -o model-W8A8 --scheme W8A8 --evaluate held-out.txt
      steelyard quantize path/to/model -o model-NVFP4 --recipe recipe.yaml --data calibration.txt
    """
    for file in filter(None, (data, evaluate)):
        data_file(file)  # before imports that take seconds
    made = recipe_from(
        scheme,
        recipe,
        observer,
        ignore,
        targets,
        gptq,
        group_size,
        num_bits,
        weigh=data is not None,
        budget=budget.budget_from(bits, max_kl, bit_widths),
    )
    if output is None and not dry_run:
        raise typer.BadParameter("-o is missing: where should the checkpoint go?")
    if statistics is not None and data is not None:
        raise typer.BadParameter("--statistics and --data exclude each other")
    with paused():
        from steelyard.entry import oneshot
        from steelyard.recipes import load_recipe

    if data is None and statistics is None and not dry_run and load_recipe(made).needs_data:
        raise typer.BadParameter(
            "--data is missing: static activations, importance and GPTQ need calibration data; "
            "give a file, or --data demo to try it with the built-in text"
        )
    reading: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_seq_length": max_seq_length,
        "batch_size": batch_size,
        "text_column": text_column,
        "split": split,
        "trust_remote_code_model": trust_remote_code,
    }
    if evaluate is not None:
        from steelyard.evaluate.held_out import check_held_out

        check_held_out(model, evaluate, **reading)  # before the run, which may take hours
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
            splits=split,
            seed=seed,
            device=device,
            activations=activations,
            pipeline=pipeline,
            uncalibrated=uncalibrated,
            uncalibratable=uncalibratable,
            overwrite=overwrite,
            resume=resume,
            dry_run=dry_run,
            trust_remote_code_model=trust_remote_code,
            statistics=statistics,
            show_progress=is_first() and not dry_run,
        )
    except KeyboardInterrupt:
        raise Interrupted("the same command resumes the run") from None
    if not json and dry_run:
        _print_lines(str(result.plan))
    elif not json:
        print_summary(result)
    found = None
    if evaluate is not None and result.output_dir is not None and is_first():
        found = _evaluated(model, result.output_dir, evaluate, device=device, **reading)
    if json:
        evaluation = {} if found is None else {"evaluation": found.as_dict()}
        print_document("quantize", {**as_document(result), **evaluation})
    elif found is not None:
        print_line()
        print_study(found, evaluate or "")
    if dry_run and result.plan.errors:
        raise typer.Exit(USAGE)


def _evaluated(model: str, folder: Path, data: str, **options: Any) -> Study:
    """Compare a finished checkpoint with its model, and add the result to its report."""
    from steelyard.evaluate import study

    try:
        found = study(model, folder, data, show_progress=True, **options)
    except KeyboardInterrupt:
        raise Interrupted(
            f"the checkpoint in {folder} is complete; measure it with `steelyard evaluate`"
        ) from None
    add_to_report(folder, found)
    return found


def as_document(result: Result) -> dict[str, Any]:
    """Return the result of a run as JSON types."""
    from steelyard.engine.summary import report_in, stored_bytes

    plan, folder = result.plan, result.output_dir
    before, after = plan.source_bytes, stored_bytes(result)
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
        "warnings": [in_options(warning) for warning in result.warnings],
        "errors": [in_options(error) for error in plan.errors],
    }


def _without_figures(details: dict[str, Any]) -> dict[str, Any]:
    """Return an algorithm's details without "figures", which the report has."""
    return {name: value for name, value in details.items() if name != "figures"}


def print_summary(result: Result) -> None:
    """Print a summary of a run."""
    from steelyard.engine.summary import error_table, summary_lines

    titles, rows = error_table(result)
    print_table([Column(title, right=i > 0) for i, title in enumerate(titles)], rows)
    print_line()
    _print_lines("\n".join(summary_lines(result, said=result.plan.warnings)))


def _print_lines(text: str) -> None:
    for line in in_options(text).split("\n"):
        print_line(line, LINE_STYLES.get(line.partition(":")[0]))
