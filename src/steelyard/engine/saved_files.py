"""Checks the paths of files that a run saves besides its checkpoint, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steelyard.algorithms import Algorithm
from steelyard.checkpoint.place import output_path
from steelyard.engine.statistics_file import STATISTICS
from steelyard.errors import PlanError

__all__ = ["check_saved_files"]


def check_saved_files(
    algorithms: Sequence[Algorithm],
    save_statistics: str | Path | None,
    output_dir: str | Path | None,
) -> None:
    """Raise for files that could not be written at the end, or would be lost with old output."""
    wanted = [file for algorithm in algorithms for file in algorithm.files()]
    files = [*wanted, *([(STATISTICS, save_statistics)] if save_statistics is not None else [])]
    output = None if output_dir is None else output_path(output_dir)
    seen: set[Path] = set()
    for kind, path in files:
        kind.check_place(path)
        place = Path(path).resolve()
        if place in seen:
            raise PlanError(f"{path} is named for two files; give each a name of its own")
        seen.add(place)
        if output is not None and output in (place, *place.parents):
            raise PlanError(
                f"{path} lies in the output folder, which is replaced as a whole; save the "
                f"{kind.what} elsewhere, such as {output.with_name(place.name)}"
            )
