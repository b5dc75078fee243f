"""Importance, E[x^2] of every input channel: from files, or gathered by the observers that use it.

Observers that weight columns gather it themselves, in the pass that runs anyway. This algorithm
selects those observers, adds the importance of files, and saves the sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from steelyard.algorithms.algorithm import Algorithm, Needs
from steelyard.algorithms.block import Block
from steelyard.errors import ImportanceError
from steelyard.model.source import Source
from steelyard.modifiers import IMatrixGatherer
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.observers.importance_file import (
    IMPORTANCE,
    load_importance,
    merge_importance,
    save_importance,
)
from steelyard.plan.plan import Plan
from steelyard.words import count

__all__ = ["GatherImportance"]

Sums = dict[str, tuple[torch.Tensor, int]]


@Algorithm.register("importance")
class GatherImportance(Algorithm):
    """Lets the observers of its targets weight columns by importance.

    loaded:   sums of squares and tokens from files, for modules that will be quantized
    gathered: sums of this run, including those of the run that it resumes
    """

    transforms = False  # `transform` changes observers, not tensors
    streams = True
    mergeable = True
    modifier: IMatrixGatherer

    def __init__(self, modifier: IMatrixGatherer) -> None:
        super().__init__(modifier)
        self.loaded: Sums = {}
        self.gathered: Sums = {}

    @property
    def needs(self) -> Needs:
        return Needs(importance=not self.modifier.load_from)

    @property
    def gives_importance(self) -> bool:
        return bool(self.modifier.load_from)

    # -- one block ----------------------------------------------------------------------------

    def begin(self, block: Block) -> None:
        block.calibration.weigh(block.modules)

    def transform(self, block: Block, state: None) -> None:
        """Store the sums of this run, and add those of the files to the observers."""
        for name, _, observer in block.calibration.observers():
            if not isinstance(observer, ImportanceObserver):
                continue
            if observer.gathered is not None:
                self.gathered[name] = observer.gathered
            if name in self.loaded:
                observer.add_importance(*self.loaded[name])

    # -- files --------------------------------------------------------------------------------

    def prepare(self, source: Source, plan: Plan, notes: list[str]) -> None:
        """Read the files; raise if they are of another model, and note missing modules."""
        files = self.modifier.load_from
        if not files:
            return
        names = [planned.name for planned in plan.quantized]
        kind = str(source.config().get("model_type", "llama"))
        self.loaded = merge_importance(*(load_importance(file, names, kind) for file in files))
        for planned in plan.quantized:
            squares, _ = self.loaded.get(planned.name, (None, 0))
            if squares is not None and squares.shape != (planned.shape[1],):
                raise ImportanceError(
                    f"{', '.join(files)} has {len(squares)} input channels for {planned.name}, "
                    f"which has {planned.shape[1]}; it is not of this model"
                )
        absent = [name for name in names if name not in self.loaded]
        if len(absent) == len(names):
            raise ImportanceError(f"{', '.join(files)} has importance for none of the modules")
        if absent:
            notes.append(
                f"the importance files lack {count(len(absent), 'module')}, such as {absent[0]}"
            )

    def importance(self, name: str) -> tuple[torch.Tensor, int] | None:
        return self.loaded.get(name)

    def digests(self) -> dict[str, str]:
        files = self.modifier.load_from
        return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}

    def files(self) -> list[tuple[Any, str]]:
        return [] if self.modifier.save_to is None else [(IMPORTANCE, self.modifier.save_to)]

    def save(self) -> None:
        if self.modifier.save_to is not None:
            save_importance(self.gathered, self.modifier.save_to)

    def keep(self, path: Path) -> bool:
        if self.gathered:
            save_importance(self.gathered, path)
        return bool(self.gathered)

    def resume(self, path: Path) -> None:
        self.gathered.update(load_importance(path))

    # -- ranks --------------------------------------------------------------------------------

    def found(self, names: Collection[str]) -> Sums:
        return {name: sums for name, sums in self.gathered.items() if name in names}

    def receive(self, found: Sums) -> None:
        self.gathered.update(found)
