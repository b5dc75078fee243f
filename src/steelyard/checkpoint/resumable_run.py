"""A run that records its progress, and resumes from there.

A mark records that everything added so far is on disk. Each rank replaces its journal, one sealed
file, atomically. A run that resumes removes files that no journal lists.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from steelyard.checkpoint.earlier_run import EarlierRun
from steelyard.checkpoint.growing_shards import GrowingShards
from steelyard.checkpoint.journal import check_file
from steelyard.checkpoint.place import check_output
from steelyard.checkpoint.work_folder import WorkFolder
from steelyard.distributed import Ranks
from steelyard.errors import CheckpointError

__all__ = ["ResumableRun"]


class ResumableRun:
    """The persistent state of a writer.

    progress: content of the last marks, of each rank of an earlier run or of this one
    files:    files in the work folder that the marks need: name -> `file_record`
    changed:  tensors that the run changed without quantizing them; see `claim`
    finished: the checkpoint is in place
    """

    mark_seconds: ClassVar[float] = 10.0
    """Time between two marks: the most that a crash loses."""

    def __init__(
        self,
        output_dir: Path,
        max_shard_bytes: int,
        identity: dict[str, Any] | None,
        resume: bool,
        ranks: Ranks | None,
    ) -> None:
        self.output_dir = output_dir
        self.identity = identity
        self.ranks = ranks or Ranks()
        self.work = WorkFolder(output_dir)
        self.progress: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, int]] = {}
        self.changed: set[str] = set()
        self.finished = False
        self._earlier = EarlierRun(self.work, identity, resume)
        self._shards = GrowingShards(self.work.checkpoint, max_shard_bytes)
        self._marked = 0.0  # time of the last mark
        self._keep = False  # keep the work folder when the run fails

    @property
    def partial(self) -> Path:
        """Folder of the unfinished checkpoint."""
        return self.work.checkpoint

    # -- resuming -----------------------------------------------------------------------------

    def _start(self, overwrite: bool, keep_tokenizer: bool) -> None:
        """Resume an earlier run, or start a new one, on the first rank; inform the others."""
        begun = None
        if self.ranks.is_first:
            self.work.open()
            try:
                self._resume(overwrite, keep_tokenizer)
            except BaseException:
                self.work.close(keep=True)
                raise
            begun = (
                self.progress,
                self.files,
                sorted(self.changed),
                self.finished,
                self._keep,
                self._shards.complete,
                self._shards.incomplete,
            )
        begun = self.ranks.broadcast(begun)
        assert begun is not None
        self.progress, self.files, changed, self.finished, self._keep, complete, incomplete = begun
        self.changed = set(changed)
        self._shards.adopt(complete, incomplete)
        self._marked = time.monotonic()

    def _resume(self, overwrite: bool, keep_tokenizer: bool) -> None:
        journals = self._earlier.journals()
        self.finished = self._earlier.is_finished
        if not journals:
            self.work.clear()  # may restore an output that an earlier run moved aside
            check_output(self.output_dir, overwrite, keep_tokenizer)
            self.partial.mkdir()
            return
        self._keep = True
        self.progress = [each for journal in journals for each in journal["progress"]]
        for journal in journals:
            self.files.update(journal["files"])
            self.changed.update(journal["changed"])
        if self.finished:
            if self.partial.exists():  # the old output: the two were exchanged
                shutil.rmtree(self.partial)
            return
        if not self.partial.is_dir():
            raise CheckpointError(f"{self.partial} is gone; start anew with resume=False")
        for name, record in self.files.items():
            check_file(self.work.path / name, record)
        self._shards.restore(journals)
        if len(journals) > 1:  # several ranks: from now on the first journal covers them all
            self._record(self.progress, complete=False)
            self.work.forget_ranks()

    # -- marks --------------------------------------------------------------------------------

    def due(self, cost: float = 0.0) -> bool:
        """Whether it is time for a mark.

        cost: seconds that the last one took, without the wait for the disk; marks take at most a
              twentieth of the run
        """
        passed = time.monotonic() - self._marked
        return self.identity is not None and passed >= self.mark_seconds * max(1.0, 2 * cost)

    def _record(self, progress: list[dict[str, Any]], complete: bool) -> None:
        """Write the journal; the bytes that it lists are on the disk."""
        if self.identity is None and not complete:
            return
        self.work.record(
            {
                "identity": self.identity or {},  # without one, no run resumes from here
                "complete": complete,
                "folder": self.partial.stat().st_ino,  # unchanged when it is renamed
                "shards": self._shards.complete,
                "open": self._shards.open_states(),
                "files": self.files,
                "changed": sorted(self.changed),
                "progress": progress,
            },
            self.ranks.rank,
        )
        self.progress = progress
        self._keep = True
        self._marked = time.monotonic()

    def claim(self, names: Iterable[str]) -> None:
        """Record that the run changed these tensors of the source.

        names: as in the files; the `weight` of a quantized module too, where it was changed before
               it was quantized

        The validator requires the source's bytes for all others. The next mark records the claims,
        and `join` gathers those of all ranks.
        """
        self.changed.update(names)

    def _gather(self) -> None:
        """Wait until all ranks have written their shards; gather their records and claims."""
        self._shards.end_planned()
        gathered = self.ranks.gather((self._shards.complete, sorted(self.changed)))
        self._shards.join([complete for complete, _ in gathered])
        for _, changed in gathered:
            self.changed.update(changed)
