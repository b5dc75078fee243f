"""`steelyard validate`: checks a checkpoint against its own config and its source."""

from __future__ import annotations

import contextlib
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
    from steelyard.checkpoint.scale_values import ReportedScales
    from steelyard.checkpoint.written import WrittenCheckpoint

__all__ = ["validate"]


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
    wrote to provenance.json. Exits with 1 if there is a problem.

    \b
    Examples:
      steelyard validate model-FP8
      steelyard validate model-FP8 --source path/to/model
      steelyard validate model-FP8 --source path/to/model --full
    """
    original = None if source is None else options.existing_model(source)
    if full and original is None:
        raise typer.BadParameter("give the original model too, with --source", param_hint="--full")
    from steelyard.model.model_folder import model_folder

    folder = model_folder(checkpoint)
    origin = None if original is None else model_folder(original)
    found = _check(folder, origin, full)
    if json:
        print_document("validate", _document(folder, origin, found))
    else:
        _print(folder, origin, found)
    if found.problems:
        raise typer.Exit(FAILED)


def _check(folder: Path, origin: Path | None, full: bool) -> Findings:
    from steelyard.checkpoint import CheckpointView, check_checkpoint
    from steelyard.checkpoint.written import WrittenCheckpoint
    from steelyard.engine.progress import progress
    from steelyard.errors import CheckpointError
    from steelyard.fusion import fused_groups
    from steelyard.model.class_loading import loading_problems, tied_problems
    from steelyard.model.file_modules import untie_as_written

    try:
        written = WrittenCheckpoint(folder, None)
    except CheckpointError:  # raised here too, after checking digests
        return check_checkpoint(folder, watch=progress)
    reported, scales, notes = _reported(written)
    negative, nearest = _recipe(written)
    view = None
    if origin is not None:
        view = CheckpointView(origin)
        for stack in [each for each in view.stacks if each.name in written.shards]:
            view.restack(stack)
        untie_as_written(view, written.schemes)
    found = check_checkpoint(
        folder,
        source=view,
        reported=reported,
        scales=scales,
        fused=list(fused_groups(written.schemes)),
        allow_negative=negative,
        nearest=nearest,
        full=full,
        watch=progress,
    )
    infos = [written.shards.info(name) for name in written.shards]
    specs = {info.name: (info.dtype, info.shape) for info in infos}
    found.problems += tied_problems(written.config, specs)
    found.notes += notes
    if not found.problems:
        found.notes += loading_problems(written.config, specs)
    return found


def _reported(
    written: WrittenCheckpoint,
) -> tuple[dict[str, float], dict[str, ReportedScales], list[str]]:
    """Return the errors and scales in report.json for modules of these files."""
    from steelyard.checkpoint.scale_values import ReportedScales
    from steelyard.errors import ReportError
    from steelyard.report import read_report

    folder = Path(written.shards.folder)
    if not (folder / "report.json").is_file():
        return {}, {}, []
    try:
        modules = read_report(folder).modules
    except ReportError as error:
        return {}, {}, [str(error)]
    known = [module for module in modules if module.name in written.tensors]
    errors = {m.name: m.error for m in known if m.error is not None}
    scales = {
        m.name: ReportedScales(
            None if m.scale is None else (m.scale.min, m.scale.max),
            {local: (ends[0], ends[1]) for local, ends in m.activations.items() if len(ends) == 2},
        )
        for m in known
    }
    return errors, scales, []


def _recipe(written: WrittenCheckpoint) -> tuple[bool | None, bool]:
    """Whether the checkpoint's recipe allows negative scales, and rounds to nearest.

    None without a recipe of ours: then the scheme decides.
    """
    from steelyard.errors import SteelyardError
    from steelyard.recipes import load_recipe

    nearest, configs = False, []
    path = Path(written.shards.folder) / "recipe.yaml"
    if path.is_file():
        with contextlib.suppress(SteelyardError):  # another program's recipe, with other options
            recipe = load_recipe(path)
            nearest = all(algorithm.rounds_to_nearest for algorithm in recipe.algorithms())
            made = [modifier.quantization_config() for modifier in recipe.modifiers]
            configs = [config for config in made if config is not None]
    if not configs:
        return None, nearest
    groups = [group for config in configs for group in config.config_groups.values()]
    kwargs = [g.weights.observer_kwargs or {} for g in groups if g.weights is not None]
    return any(k.get("negative_scales") is True for k in kwargs), nearest


def _document(folder: Path, origin: Path | None, found: Findings) -> dict[str, Any]:
    rows, digests = found.rows, found.digests
    return {
        "checkpoint": str(folder),
        "source": None if origin is None else str(origin),
        "modules": found.modules,
        "decoded": None if rows is None else {"rows": rows.rows, "of": rows.total},
        "digests": None if digests is None else {"files": digests.files, "bytes": digests.bytes},
        "notes": found.notes,
        "problems": found.problems,
    }


def _print(folder: Path, origin: Path | None, found: Findings) -> None:
    for note in found.notes:
        print_line(f"note: {note}")
    if found.problems:
        problems = [f"problem: {each}" for each in found.problems]
        print_line(joined_lines("\n".join(problems)), style="red")
        print_line()
    for line in _extent(found):
        print_line(line)
    if found.problems:
        count = len(found.problems)
        print_line(f"{count} problem{'s' if count > 1 else ''} in {folder}")
        return
    against = f", against {origin}" if origin is not None else ""
    print_line(f"{folder} is valid: {found.modules} quantized modules checked{against}", "green")


def _extent(found: Findings) -> Iterator[str]:
    """Yield lines on how much was checked."""
    if found.digests is not None:
        count = f"{found.digests.files:,} files, {size(found.digests.bytes)}"
        yield f"compared digests of {count}"
    if found.rows is not None and found.rows.total:
        rows, total = found.rows.rows, found.rows.total
        some = f"decoded {rows:,} of {total:,} rows; --full decodes all"
        yield f"decoded all {total:,} rows of quantized weights" if rows == total else some
