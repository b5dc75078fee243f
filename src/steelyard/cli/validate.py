"""`steelyard validate`: does a checkpoint hold what its own config promises?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli import options
from steelyard.cli.grouping import joined_lines
from steelyard.cli.mistakes import FAILED
from steelyard.cli.terminal import print_document, print_line

if TYPE_CHECKING:
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
            help="What it was made of: weights are decoded and compared, all else byte by byte.",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check that a checkpoint holds what its config promises.

    Every tensor in its type and shape, and scales that can be used: a server loads a checkpoint
    that lacks a scale without a word. Ends with 1 if there is a problem.

    \b
    Examples:
      steelyard validate model-FP8
      steelyard validate model-FP8 --source path/to/model
    """
    original = None if source is None else options.existing_model(source)
    from steelyard.checkpoint import CheckpointView, validate_checkpoint
    from steelyard.checkpoint.written import WrittenCheckpoint
    from steelyard.errors import CheckpointError
    from steelyard.observers.fusion import fused_groups
    from steelyard.pipelines.class_loading import loading_problems, tied_problems
    from steelyard.pipelines.source import model_folder

    folder = model_folder(checkpoint)
    view = None if original is None else CheckpointView(model_folder(original), cut=False)
    notes: list[str] = []
    try:
        written = WrittenCheckpoint(folder, None)
    except CheckpointError as error:
        modules, problems = 0, [" ".join(str(error).split())]
    else:
        modules = len(written.schemes)
        problems = validate_checkpoint(
            folder,
            source=view,
            fused=list(fused_groups(written.schemes)),
            allow_negative=_negative(written),
        )
        infos = [written.shards.info(name) for name in written.shards]
        specs = {info.name: (info.dtype, info.shape) for info in infos}
        problems += tied_problems(written.config, specs)
        notes = [] if problems else loading_problems(written.config, specs)
    if json:
        print_document(
            "validate",
            {
                "checkpoint": str(folder),
                "source": None if view is None else str(view.folder),
                "modules": modules,
                "problems": problems,
                "notes": notes,
            },
        )
    elif problems:
        print_line(joined_lines("\n".join(f"problem: {each}" for each in problems)), style="red")
        print_line()
        print_line(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {folder}")
    else:
        against = f", against {view.folder}" if view is not None else ""
        print_line(f"{folder} is good: {modules} quantized modules checked{against}", "green")
        for note in notes:
            print_line(f"note: {note}")
    if problems:
        raise typer.Exit(FAILED)


def _negative(written: WrittenCheckpoint) -> bool:
    """Whether negative scales were asked for, which the checkpoint's own recipe tells."""
    groups = written.quantization.config_groups.values()
    kwargs = [s.weights.observer_kwargs or {} for s in groups if s.weights is not None]
    recipe = Path(written.shards.folder) / "recipe.yaml"
    text = recipe.read_text("utf-8", errors="replace") if recipe.is_file() else ""
    return any(k.get("negative_scales") for k in kwargs) or "negative_scales: true" in text
