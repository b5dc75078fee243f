"""The importance of a run: what files hold, what is gathered on the way, what is kept of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from steelyard.errors import ImportanceError
from steelyard.model.source import Source
from steelyard.modifiers.importance import gatherers_in
from steelyard.observers.calibration import Calibration
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.observers.importance_file import (
    Importance,
    load_importance,
    merge_importance,
    save_importance,
)
from steelyard.plan.plan import Plan
from steelyard.recipes import Recipe
from steelyard.words import count

__all__ = ["RunImportance"]


class RunImportance:
    """What the recipe's gatherers ask for.

    loaded:   from their files, of the modules that are to be quantized
    gathered: in this run, or the one that it continues
    """

    def __init__(self, recipe: Recipe) -> None:
        self.gatherers = gatherers_in(recipe.modifiers)
        self.files = [file for gatherer in self.gatherers for file in gatherer.load_from]
        self.loaded: Importance = {}
        self.gathered: Importance = {}

    # -- files --------------------------------------------------------------------------------

    def load(self, source: Source, plan: Plan, notes: list[str]) -> None:
        """Read the files; refuse those of another model, and note what they lack."""
        if not self.files:
            return
        names = [planned.name for planned in plan.quantized]
        kind = str(source.config().get("model_type", "llama"))
        self.loaded = merge_importance(*(load_importance(f, names, kind) for f in self.files))
        for planned in plan.quantized:
            squares, _ = self.loaded.get(planned.name, (None, 0))
            if squares is not None and squares.shape != (planned.shape[1],):
                raise ImportanceError(
                    f"{', '.join(self.files)} has {len(squares)} input channels for "
                    f"{planned.name}, which has {planned.shape[1]}; it is not of this model"
                )
        absent = [name for name in names if name not in self.loaded]
        if len(absent) == len(names):
            raise ImportanceError(f"{', '.join(self.files)} has importance for none of the modules")
        if absent:
            notes.append(
                f"the importance files hold nothing for {count(len(absent), 'module')}, such as "
                f"{absent[0]}"
            )

    def digests(self) -> dict[str, str]:
        """Return what tells whether a file is still the same."""
        return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in self.files}

    def save(self) -> None:
        """Write what was gathered to where the gatherers want it."""
        for gatherer in self.gatherers:
            if gatherer.save_to is not None:
                save_importance(self.gathered, gatherer.save_to)

    # -- one part of the model ----------------------------------------------------------------

    def only_where_asked(self, calibration: Calibration) -> None:
        """Where there is an IMatrixGatherer, its targets say which modules gather importance."""
        if not self.gatherers:
            return
        for name, _, observer in calibration.observers():
            module = calibration.modules[name]
            asked = any(gatherer.covers(name, module) for gatherer in self.gatherers)
            if isinstance(observer, ImportanceObserver) and not asked:
                observer.detach(module)
                observer.reset()

    def exchange(self, calibration: Calibration) -> None:
        """Keep what was gathered, and add what files hold."""
        for name, _, observer in calibration.observers():
            if not isinstance(observer, ImportanceObserver):
                continue
            if observer.gathered is not None:
                self.gathered[name] = observer.gathered
            if name in self.loaded:
                observer.add_importance(*self.loaded[name])

    # -- stopping and going on ----------------------------------------------------------------

    def keep(self, path: Path) -> bool:
        """Write what was gathered so far, if anything was; return whether there is a file."""
        if self.gathered:
            save_importance(self.gathered, path)
        return bool(self.gathered)

    def resume(self, path: Path) -> None:
        self.gathered = load_importance(path)
