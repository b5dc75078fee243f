"""Writes a checkpoint atomically: it is complete or absent.

Everything is written to a hidden folder next to the output, and moved into place by one rename when
it is complete and on disk. A server that watches the output never reads an incomplete one. A run
that fails before its first mark leaves no files; after it, the same command resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from steelyard.atomic_file import sync
from steelyard.checkpoint.config_file import CONFIG, write_config
from steelyard.checkpoint.other_files import copy_files, other_files
from steelyard.checkpoint.place import check_apart, check_output, output_path
from steelyard.checkpoint.provenance import PROVENANCE, RunRecord, write_provenance
from steelyard.checkpoint.resumable_run import ResumableRun
from steelyard.checkpoint.shard_index import INDEX
from steelyard.checkpoint.shards import Shards
from steelyard.checkpoint.tokenizer_files import tokenizer_files
from steelyard.distributed import Ranks
from steelyard.errors import (
    CalibrationError,
    CheckpointError,
    OutputError,
    RanksError,
    ReportError,
    SteelyardError,
)

__all__ = ["CheckpointWriter"]


class CheckpointWriter(ResumableRun):
    """Write tensors, files and a config; use it as a context manager and end with `finish`.

    overwrite:       replace the contents of `output_dir`, once the new checkpoint is complete
    keep_tokenizer:  keep the tokenizer in `output_dir`, if none was written
    max_shard_bytes: a shard holds at most this much, or one tensor that is larger
    source:          the checkpoint that is read, which must not be overwritten
    identity:        inputs of the run by name, in JSON's types: a run resumes from the marks of an
                     earlier one if these match; None makes no marks
    resume:          False discards an earlier run
    ranks:           the ranks that write this checkpoint together, each its own shards; the first
                     one starts and finishes it

    >>> with CheckpointWriter("out") as writer:
    ...     writer.add("model.norm.weight", torch.ones(8))
    ...     writer.finish({"model_type": "llama"})
    PosixPath('/home/me/out')
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        overwrite: bool = False,
        keep_tokenizer: bool = False,
        max_shard_bytes: int = 5 * 10**9,
        source: Shards | str | Path | None = None,
        identity: dict[str, Any] | None = None,
        resume: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(output_path(output_dir), max_shard_bytes, identity, resume, ranks)
        self.overwrite = overwrite
        self.keep_tokenizer = keep_tokenizer
        self.max_shard_bytes = max_shard_bytes
        self.source: Path | None = None
        if source is not None:
            self.source = source.folder if isinstance(source, Shards) else Path(source)
            check_apart(self.output_dir, self.source.resolve())
        check_output(self.output_dir, True, keep_tokenizer)
        if self.ranks.is_first and not self._earlier.is_finished:
            self._earlier.check_output(overwrite, keep_tokenizer)
        self._open = False

    # -- lifecycle --------------------------------------------------------------------------

    def __enter__(self) -> CheckpointWriter:
        self._start(self.overwrite, self.keep_tokenizer)
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *exc: object
    ) -> None:
        self._open = False
        self._shards.abandon()
        if error is not None:  # before the folder that they write to is removed
            self.ranks.announce(error)
        if not self.ranks.is_first:
            return
        # errors whose cause the user can remove, and then resume
        lasting = (CheckpointError, CalibrationError, RanksError, OutputError, ReportError)
        worth = kind is not None and not (
            issubclass(kind, SteelyardError) and not issubclass(kind, lasting)
        )
        together = kind is not None and self.ranks.count > 1  # others may still be writing
        self.work.close(keep=(self._keep and worth) or together)
        if kind is None and not self.finished:
            raise RuntimeError("the checkpoint was not finished: call finish(config) at the end")

    def _require_open(self) -> None:
        if not self._open or self.finished:
            raise RuntimeError("write inside `with CheckpointWriter(...)`, before finish")

    def mark(
        self, progress: dict[str, Any], files: dict[str, dict[str, int]] | None = None
    ) -> None:
        """Record that everything added so far is done, and the state to resume from.

        files: files in the work folder that it needs: name -> `file_record`; None for those of the
               last mark
        """
        self._require_open()
        if files is not None:
            self.files = files
        self._record([progress], complete=False)

    # -- tensors ----------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._shards.names

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""
        self._require_open()
        tensor = tensor.detach().cpu().contiguous()
        self._shards.file_for(name, tensor.nbytes, tensor.ndim).add(name, tensor)

    def copy(self, name: str, source: Shards, pieces: Iterable[Any] | None = None) -> None:
        """Write a tensor of another checkpoint, a piece at a time.

        pieces: its bytes, if the caller checks them while they are copied
        """
        self._require_open()
        info = source.info(name)
        file = self._shards.file_for(name, info.nbytes, len(info.shape))
        given = source.pieces(name) if pieces is None else pieces
        file.add_pieces(name, info.dtype, info.shape, given)

    def at(self, position: int) -> None:
        """Write the tensors that follow to one shard, which holds them all.

        The files do not depend on the order in which ranks or an earlier run started their shards.
        """
        self._shards.at(position)

    def is_complete(self, position: int) -> bool:
        """Whether this run, or the one that it resumes, has completed a shard."""
        return position in self._shards.complete

    def join(self) -> None:
        """Wait until all ranks have written their shards; every rank must call."""
        self._require_open()
        self._gather()

    def replace(self, tensors: Mapping[str, torch.Tensor], progress: dict[str, Any]) -> None:
        """Replace tensors of the complete checkpoint by others of their types and shapes.

        Only within the `check` of `finish`. They take effect with the mark that records
        `progress`: a run that is killed before it finds the old ones, and all of them.
        """
        self._require_open()
        with Shards(self.partial) as written:
            self._shards.rewrite(written, tensors)
        self._record([progress], complete=False)
        self._shards.name_all()
        sync(self.partial)

    # -- other files ------------------------------------------------------------------------

    def carry(self, shards: Shards) -> list[Path]:
        """Copy all files but weights and config.json; keep files that were written already."""
        return self._carry(shards.folder, shards.other_files())

    def carry_files(self, folder: Path) -> list[Path]:
        """Copy all files but weights from a folder that need not be a checkpoint."""
        return self._carry(folder, other_files(folder))

    def carry_tokenizer(self, folder: Path) -> list[Path]:
        """Copy only the files of a tokenizer or processor."""
        return self._carry(folder, tokenizer_files(folder))

    def _carry(self, folder: Path, files: list[Path]) -> list[Path]:
        self._require_open()
        return copy_files(folder, files, self.partial, without=(CONFIG, PROVENANCE))

    def write_text(self, name: str, text: str) -> None:
        """Write a text file; `name` is relative to the output."""
        self._require_open()
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name in (CONFIG, INDEX):
            raise CheckpointError(
                f"{name} cannot be written here: {CONFIG} and {INDEX} come from "
                "finish, and all files are inside the output"
            )
        target = self.partial / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")

    # -- the end ----------------------------------------------------------------------------

    def finish(
        self,
        config: dict[str, Any],
        check: Callable[[Path], None] | None = None,
        changed: Iterable[str] = (),
        run: Callable[[], RunRecord] | None = None,
    ) -> Path:
        """Write the config, name the shards, and move the checkpoint into place; return its path.

        check:   called with the complete folder before it is moved; may raise
        changed: tensors to `claim`; all claims go to provenance.json
        run:     returns what provenance.json states about the run, after `check`

        A run that makes marks makes one when all tensors are written, before this call. A complete
        checkpoint is kept: if it cannot be moved into place, the error says where it is.
        """
        self._require_open()
        self._shards.end_current()
        if not self._shards.complete:
            raise CheckpointError(f"no tensor was added to {self.output_dir}")
        self.claim(changed)
        self._record(self.progress, complete=False)
        if self.keep_tokenizer and self.output_dir.is_dir():
            self.carry_tokenizer(self.output_dir)
        write_config(self.partial, config)
        self._shards.name_all()
        for path in (*self.partial.rglob("*"), self.partial):
            sync(path)
        self._keep = True
        if check is not None:
            check(self.partial)
        record = None if run is None else run()
        write_provenance(  # last, since `check` may add files
            self.partial, self.source, self.changed, record
        )
        self._record(self.progress, complete=True)
        try:
            check_output(
                self.output_dir, self.overwrite, self.keep_tokenizer
            )  # hours may have passed since the first time
            self.work.move_into_place()
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint is complete, but could not be moved to {self.output_dir}: "
                f"{error}; it is kept at {self.partial} until the next run for this output"
            ) from error
        self.finished = True
        return self.output_dir
