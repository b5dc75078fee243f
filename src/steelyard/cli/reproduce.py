"""`steelyard reproduce`: runs a recorded recipe again, and compares every byte."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.grouping import joined_lines
from steelyard.cli.mistakes import FAILED
from steelyard.cli.terminal import print_document, print_line

if TYPE_CHECKING:
    from steelyard.checkpoint.provenance import RunRecord

__all__ = ["reproduce"]

_RECORDED_ONLY = ("save_compressed", "stage")


def reproduce(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            callback=options.existing_model,
            help="A folder that a run of Steelyard wrote.",
        ),
    ],
    base: Annotated[
        str,
        typer.Option("--base", metavar="MODEL", help="The original model.", show_default=False),
    ],
    data: options.Data = None,
    tokenizer: options.Tokenizer = None,
    plugins: options.Plugins = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Run the recipe of a checkpoint again, and compare every tensor.

    Recipe and options are those in recipe.yaml and provenance.json; the data is given again, and
    its tokens must have the recorded digest. Exits with 1 if a tensor differs, and names it.

    \b
    Examples:
      steelyard reproduce model-FP8 --base path/to/model
      steelyard reproduce model-INT4 --base path/to/model --data calibration.txt
    """
    from steelyard.checkpoint import Shards
    from steelyard.checkpoint.comparison import differences
    from steelyard.checkpoint.provenance import read_provenance
    from steelyard.engine.identity import versions
    from steelyard.entry import oneshot
    from steelyard.errors import CheckpointError

    folder = Path(checkpoint)
    provenance = read_provenance(folder)
    recorded = None if provenance is None else provenance.run
    if recorded is None:
        raise CheckpointError(
            f"{folder} has no provenance.json of a run, so its options are not known; quantize the "
            "model again"
        )
    if (recorded.calibration is None) != (data is None):
        given = "has no calibration data" if recorded.calibration is None else "used data: give it"
        raise typer.BadParameter(f"the recorded run {given}", param_hint="--data")
    with tempfile.TemporaryDirectory(dir=folder.resolve().parent, prefix=".reproduce-") as work:
        again = Path(work) / "checkpoint"
        oneshot(
            options.existing_model(base),
            folder / "recipe.yaml",
            data,
            again,
            tokenizer=tokenizer,
            trust_remote_code_model=trust_remote_code,
            **_options(recorded),
        )
        made = read_provenance(again)
        assert made is not None and made.run is not None
        notes = list(_notes(recorded, made.run, versions()))
        with Shards(folder) as first, Shards(again) as second:
            problems = list(differences(first, second))
            compared = len(list(first))
    if json:
        content: dict[str, Any] = {"checkpoint": str(folder), "tensors": compared}
        print_document("reproduce", {**content, "notes": notes, "differences": problems})
    else:
        for note in notes:
            print_line(f"note: {note}")
        if problems:
            listed = "\n".join(f"problem: {each}" for each in problems)
            print_line(joined_lines(listed), "red")
            print_line(f"{len(problems):,} of {compared:,} tensors differ")
        else:
            print_line(f"{folder} is reproduced: {compared:,} tensors have the same bytes", "green")
    if problems:
        raise typer.Exit(FAILED)


def _options(recorded: RunRecord) -> dict[str, Any]:
    """Return the recorded options of `oneshot`."""
    return {name: value for name, value in recorded.options.items() if name not in _RECORDED_ONLY}


def _notes(recorded: RunRecord, made: RunRecord, versions: dict[str, str]) -> list[str]:
    """Return what differs between the two runs beside their results."""
    notes = [
        f"{name} was {recorded.versions.get(name)}, here it is {version}"
        for name, version in versions.items()
        if recorded.versions.get(name) != version
    ]
    if recorded.calibration != made.calibration:
        notes.append("the calibration tokens are not those of the recorded run")
    if recorded.inputs != made.inputs:
        notes.append("statistics, importance files or plug-ins are not those of the recorded run")
    return notes
