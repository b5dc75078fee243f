"""Marks of a run in the journal of its work folder, and how a run resumes from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressed_tensors.quantization import QuantizationScheme

from steelyard.algorithms import ModuleResult
from steelyard.checkpoint.journal import file_record
from steelyard.engine.mark import Mark
from steelyard.words import count

if TYPE_CHECKING:
    from steelyard.engine.run import Run

__all__ = ["Marks"]


class Marks:
    """Records the progress of a run, and restores it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._cost = 0.0  # seconds that the last mark took

    def resume(self) -> None:
        """Restore the progress of an earlier run, if there is one."""
        if not self.run.output.progress:
            return
        weights_only = self.run.solver.own_schemes
        for mark in map(Mark.of, self.run.output.progress):  # one per rank that wrote
            for name, (error, tokens, details) in mark.modules.items():
                self.run.result.modules[name] = ModuleResult(error, tokens, details)
                if error is not None:
                    self.run.output.done.add(self.run.source.key(f"{name}.weight"))
            for name, scheme in mark.weights_only.items():
                weights_only[name] = QuantizationScheme.model_validate(scheme)
            self.run.solver.unseen = mark.unseen
            self.run.result.notes += [n for n in mark.notes if n not in self.run.result.notes]
            self.run.done, self.run.calibrated = mark.done, mark.calibrated
            self.run.finished = mark.finished
            for shard, jobs in mark.streamed.items():
                self.run.streamed[shard] = max(jobs, self.run.streamed.get(shard, 0))
        writer = self.run.output.writer
        assert writer is not None
        if writer.finished:
            self.run.result.notes.append(
                f"{writer.output_dir} is complete: an earlier run wrote it, but was killed before "
                "it could report so"
            )
            return
        for index, algorithm in enumerate(self.run.solver.algorithms):
            for path in self.kept(f"algorithm{index}"):
                algorithm.resume(path)
        for path in self.kept("statistics"):
            self.run.statistics.resume(path)
        if self.run.ranks.is_first:
            self._forget_others()
        self.run.result.notes.append(
            f"resumed after {count(len(self.run.result.modules), 'module')} of an earlier run"
        )

    def state(self) -> dict[str, Any]:
        """Return the progress that `resume` restores, as JSON types."""
        modules = self.run.result.modules.items()
        schemes = self.run.solver.own_schemes.items()
        return Mark(
            done=self.run.done,
            streamed=self.run.streamed,
            calibrated=self.run.calibrated,
            finished=self.run.finished,
            modules={name: (m.error, m.tokens, m.details) for name, m in modules},
            weights_only={name: scheme.model_dump(mode="json") for name, scheme in schemes},
            unseen=self.run.solver.unseen,
            notes=self.run.result.notes,
        ).model_dump(mode="json")

    def kept(self, kind: str) -> list[Path]:
        """Return the files of one kind that the journal names."""
        writer = self.run.output.writer
        assert writer is not None
        return [writer.work.path / n for n in sorted(writer.files) if n.startswith(f"{kind}-")]

    def keep(self, work: Path, when: str) -> dict[str, dict[str, int]]:
        """Write the statistics gathered so far; return the journal's records of the files."""
        kept = {}
        parts: list[tuple[str, Any]] = [("statistics", self.run.statistics)]
        parts += [(f"algorithm{i}", each) for i, each in enumerate(self.run.solver.algorithms)]
        for kind, part in parts:
            path = work / f"{kind}-{when}"
            if part.keep(path):
                kept[path.name] = file_record(path)
        return kept

    def _forget_others(self) -> None:
        """Remove files of earlier marks or other ranks, which the journal does not name."""
        writer = self.run.output.writer
        assert writer is not None
        for kind in ("hidden-*", "algorithm*-*", "statistics-*"):
            for old in writer.work.path.glob(kind):
                if old.name not in writer.files:
                    old.unlink()

    def layer_done(self, index: int, save: Callable[[Path], None] | None = None) -> None:
        """Count a finished layer; write a mark if one is due.

        save: writes the inputs of the next layers to a file
        """
        self.run.done = index + 1
        writer = self.run.output.writer
        if writer is None or not self.run.ranks.broadcast(writer.due(self._cost)):
            return
        started = time.monotonic()
        path = writer.work.path / f"hidden-{self.run.ranks.rank}-{self.run.done}.safetensors"
        files: dict[str, dict[str, int]] = {}
        if save is not None:
            save(path)
            files[path.name] = file_record(path)
        for others in self.run.ranks.gather(files):
            files |= others
        if not self.run.ranks.is_first:
            return
        files |= self.keep(writer.work.path, str(self.run.done))
        writer.mark(self.state(), files)
        self._forget_others()
        self._cost = time.monotonic() - started
