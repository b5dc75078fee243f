"""A checkpoint that is either complete or not there.

Everything is written to a hidden folder beside the output, and moved into place by one rename when
it is complete and on the disk. A server that watches the output never sees half of it. A run that
fails before its first mark leaves nothing behind; after it, the same run can be taken up again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import compressed_tensors
import torch
from compressed_tensors.base import (
    COMPRESSION_VERSION_NAME,
    QUANTIZATION_METHOD,
    QUANTIZATION_METHOD_NAME,
    SPARSITY_CONFIG_NAME,
    TRANSFORM_CONFIG_NAME,
)
from compressed_tensors.quantization import QuantizationConfig

from steelyard.atomic_file import sync
from steelyard.checkpoint.journal import check_file
from steelyard.checkpoint.other_files import other_files
from steelyard.checkpoint.place import check_apart, check_output, output_path
from steelyard.checkpoint.provenance import PROVENANCE, write_provenance
from steelyard.checkpoint.shard_file import ShardFile, is_whole
from steelyard.checkpoint.shards import INDEX, SINGLE, Shards
from steelyard.checkpoint.tokenizer_files import tokenizer_files
from steelyard.checkpoint.work import WorkFolder, differences
from steelyard.distributed import Ranks
from steelyard.errors import (
    CalibrationError,
    CheckpointError,
    OutputError,
    RanksError,
    ReportError,
    SteelyardError,
)

__all__ = ["CheckpointWriter", "quantization_config_dict"]

CONFIG = "config.json"


class CheckpointWriter:
    """Write tensors, files and a config; use it as a context manager and end with `finish`.

    overwrite:       replace what `output_dir` holds, once the new checkpoint is complete
    keep_tokenizer:  carry over a tokenizer that `output_dir` holds, where none was written
    max_shard_bytes: a shard holds at most this much, or one tensor that is larger
    source:          the checkpoint that is read meanwhile, and so must not be written over
    identity:        what the run is made of, by name, in JSON's types. With it `mark` records how
                     far the run came, and a later one with the same identity starts there
    resume:          False forgets an earlier run instead
    ranks:           those that write this checkpoint together, each shards of its own; the first
                     of them begins and ends it

    >>> with CheckpointWriter("out") as writer:
    ...     writer.add("model.norm.weight", torch.ones(8))
    ...     writer.finish({"model_type": "llama"})
    PosixPath('/home/me/out')
    """

    mark_seconds: ClassVar[float] = 10.0
    """How long to wait between two marks; a crash costs as much at most."""

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
        self.output_dir = output_path(output_dir)
        self.overwrite = overwrite
        self.keep_tokenizer = keep_tokenizer
        self.max_shard_bytes = max_shard_bytes
        self.identity = identity
        self.resume = resume
        self.ranks = ranks or Ranks()
        self.progress: list[dict[str, Any]] = []  # what the last marks of an earlier run said
        self.files: dict[str, dict[str, int]] = {}  # of the work folder, that they speak of
        self.finished = False  # an earlier run came to its end, but for a word
        self.changed: set[str] = set()  # see `claim`
        self.source: Path | None = None  # a folder, where there is one
        if source is not None:
            self.source = source.folder if isinstance(source, Shards) else Path(source)
            check_apart(self.output_dir, self.source.resolve())
        check_output(self.output_dir, True, keep_tokenizer)
        self.work = WorkFolder(self.output_dir)
        if self.ranks.is_first and not self._ended_unnoticed():
            self._check_place()
        self._file: ShardFile | None = None  # the shard that is being written
        self._position = 0  # its number
        self._planned = False  # the caller says which shard a tensor belongs to
        self._shards: dict[int, dict[str, Any]] = {}  # names and checksums of the complete ones
        self._left: dict[int, dict[str, Any]] = {}  # how an earlier run left those it was writing
        self._names: set[str] = set()
        self._marked = 0.0  # when
        self._keep = False  # what is on the disk is worth keeping, whatever happens
        self._open = False

    @property
    def partial(self) -> Path:
        """Where the checkpoint grows."""
        return self.work.checkpoint

    def _ended_unnoticed(self) -> bool:
        """Whether an earlier run moved its checkpoint into place, and died before it said so."""
        if self.identity is None or not self.resume:
            return False
        journal = self._journal_in_place()
        return journal is not None and journal["identity"] == self.identity

    def _journal_in_place(self) -> dict[str, Any] | None:
        """Return the journal of a run whose checkpoint is in its place, if it was left behind."""
        journal = self.work.read() if self.output_dir.is_dir() else None
        if journal is None or not journal["complete"]:
            return None
        if self.partial.exists() and self.output_dir.stat().st_ino != journal["folder"]:
            return None
        count = len(journal["shards"])
        whole = all(
            is_whole(self.output_dir / _final(int(i), count), shard)
            for i, shard in journal["shards"].items()
        )
        return journal if whole else None

    def _check_place(self) -> None:
        """Refuse an output that must not be replaced; remove what a run left that had ended."""
        try:
            ended = self._journal_in_place() is not None
            useless = ended or not self.work.read_all()
        except CheckpointError:  # a damaged journal is a matter of resuming
            ended = useless = False
        if useless:
            self.work.remove_leftover()
        try:
            check_output(self.output_dir, self.overwrite, self.keep_tokenizer)
        except CheckpointError as error:
            if not ended or self.overwrite:
                raise
            raise CheckpointError(
                f"{self.output_dir} is complete: an earlier run wrote it, and was killed before it "
                "could say so; choose another folder, or replace it with overwrite=True"
            ) from error

    # -- lifecycle --------------------------------------------------------------------------

    def __enter__(self) -> CheckpointWriter:
        begun = None
        if self.ranks.is_first:
            self.work.open()
            try:
                self._begin()
            except BaseException:
                self.work.close(keep=True)
                raise
            begun = (
                self.progress,
                self.files,
                self.finished,
                sorted(self.changed),
                self._shards,
                self._left,
                self._keep,
            )
        begun = self.ranks.broadcast(begun)
        assert begun is not None
        self.progress, self.files, self.finished, changed, self._shards, self._left, self._keep = (
            begun
        )
        self.changed = set(changed)
        for shard in (*self._shards.values(), *self._left.values()):
            self._names.update(shard["names"])
        self._position = len(self._shards)
        self._open = True
        self._marked = time.monotonic()
        return self

    def _begin(self) -> None:
        """Take up an earlier run, or begin."""
        unfinished = self.work.journal.exists() or self.work.has_ranks()
        if self.identity is None and self.resume and unfinished:
            raise CheckpointError(
                f"an unfinished run for {self.output_dir} is kept in {self.work.path}; finish it "
                "with the command that began it, choose another output, or remove that folder"
            )
        journals = self.work.read_all() if self.identity is not None and self.resume else []
        self.finished = self._ended_unnoticed()
        if self.finished and not journals:
            journals = [journal for journal in (self.work.read(),) if journal is not None]
        if not journals:
            self.work.clear()
            check_output(
                self.output_dir, self.overwrite, self.keep_tokenizer
            )  # an earlier run may have put it aside
            self.partial.mkdir()
            return
        identities = (journal["identity"] for journal in journals)
        changed = [line for each in identities for line in differences(each, self.identity or {})]
        changed = list(dict.fromkeys(changed))
        if changed:
            listed = "\n".join(f"  - {line}" for line in changed)
            raise CheckpointError(
                f"an unfinished run for {self.output_dir} was begun with something else:\n{listed}"
                "\nGive what it was begun with to continue it, or start anew with resume=False."
            )
        self._keep = True
        self.progress = [each for journal in journals for each in journal["progress"]]
        for journal in journals:
            self.files.update(journal["files"])
            self.changed.update(journal["changed"])
        if self.finished:
            if self.partial.exists():  # what the output held before: they were exchanged
                shutil.rmtree(self.partial)
            return
        self._restore(journals)
        if len(journals) > 1:  # of several ranks: from now on one speaks for them
            self._record(self.progress, complete=False)
            self.work.forget_ranks()

    def _restore(self, journals: list[dict[str, Any]]) -> None:
        if not self.partial.is_dir():
            raise CheckpointError(f"{self.partial} is gone; start anew with resume=False")
        for name, record in self.files.items():
            check_file(self.work.path / name, record)
        for journal in journals:
            self._shards.update({int(i): shard for i, shard in journal["shards"].items()})
            for i, state in journal["open"].items():
                known = self._left.get(int(i))
                if known is None or len(known["names"]) < len(state["names"]):
                    self._left[int(i)] = state
        for position, shard in self._shards.items():
            self._left.pop(position, None)
            if not is_whole(self._shard(position, len(self._shards)), shard):
                raise CheckpointError(
                    f"{self._shard(position)} is not as it was left; start anew with resume=False"
                )
        self._remove_others()

    def _remove_others(self) -> None:
        """Remove what the journal does not vouch for: files that were being written, or are old."""
        count = len(self._shards)
        kept = {self._shard(position, count) for position in self._shards}
        kept |= {self._shard(position) for position in self._left}
        for path in self.partial.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in kept:
                path.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *exc: object
    ) -> None:
        self._open = False
        if self._file is not None:
            self._file.abandon()
        if error is not None:  # before the folder goes in which they write
            self.ranks.announce(error)
        if not self.ranks.is_first:
            return
        # of which the cause can be removed
        lasting = (CheckpointError, CalibrationError, RanksError, OutputError, ReportError)
        worth = kind is not None and not (
            issubclass(kind, SteelyardError) and not issubclass(kind, lasting)
        )
        together = kind is not None and self.ranks.count > 1  # others may write still
        self.work.close(keep=(self._keep and worth) or together)
        if kind is None and not self.finished:
            raise RuntimeError("the checkpoint was not finished: call finish(config) at the end")

    def _require_open(self) -> None:
        if not self._open or self.finished:
            raise RuntimeError("write inside `with CheckpointWriter(...)`, before finish")

    # -- how far it came ----------------------------------------------------------------------

    def due(self, cost: float = 0.0) -> bool:
        """Whether it is time for a mark.

        cost: how many seconds the last one took beside the wait for the disk; they are to be at
              most a twentieth of all
        """
        passed = time.monotonic() - self._marked
        return self.identity is not None and passed >= self.mark_seconds * max(1.0, 2 * cost)

    def mark(
        self, progress: dict[str, Any], files: dict[str, dict[str, int]] | None = None
    ) -> None:
        """Record that all that was added so far is done, and what else the run must remember.

        files: those in the work folder that it needs to resume, by name, each with what
               `file_record` says of it; None for those of the last mark
        """
        self._require_open()
        if files is not None:
            self.files = files
        self._record([progress], complete=False)

    def _record(self, progress: list[dict[str, Any]], complete: bool) -> None:
        if self.identity is None and not complete:
            return
        left = dict(self._left)
        if self._file is not None:
            left[self._position] = self._file.state()
        self.work.record(
            {
                "identity": self.identity or {},  # without one, nobody resumes from here
                "complete": complete,
                "folder": self.partial.stat().st_ino,  # keeps its number when it is renamed
                "shards": self._shards,
                "open": left,
                "files": self.files,
                "changed": sorted(self.changed),
                "progress": progress,
            },
            self.ranks.rank,
        )
        self.progress = progress
        self._keep = True
        self._marked = time.monotonic()

    # -- tensors ----------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""
        tensor = tensor.detach().cpu().contiguous()
        self._file_for(name, tensor.nbytes, tensor.ndim).add(name, tensor)

    def copy(self, name: str, source: Shards, pieces: Iterable[Any] | None = None) -> None:
        """Write a tensor of another checkpoint, a piece at a time.

        pieces: its bytes, where they are looked at on their way
        """
        info = source.info(name)
        file = self._file_for(name, info.nbytes, len(info.shape))
        given = source.pieces(name) if pieces is None else pieces
        file.add_pieces(name, info.dtype, info.shape, given)

    def claim(self, names: Iterable[str]) -> None:
        """Record that the run changed these tensors of the source.

        names: as in the files; the `weight` of a quantized module too, where it was changed before
               it was quantized

        The validator holds all others to the bytes of the source. Claims are part of the next mark,
        and `join` gathers those of all ranks.
        """
        self.changed.update(names)

    def at(self, position: int) -> None:
        """Let the tensors that follow be those of one shard, which holds them all.

        Shards that were not begun in order, by several ranks or by an earlier run, come out as if
        they were.
        """
        if self._planned and position != self._position:
            self._close_shard()
        self._planned, self._position = True, position

    def is_complete(self, position: int) -> bool:
        """Whether a shard was ended, by this run or the one that it continues."""
        return position in self._shards

    def _file_for(self, name: str, nbytes: int, dimensions: int) -> ShardFile:
        self._require_open()
        if name in self._names:
            raise CheckpointError(f"{name} was added to {self.output_dir} twice")
        self._names.add(name)
        if not self._planned:
            self._position = len(self._shards)
            file = self._current()
            if file.names and (
                file.nbytes + nbytes > self.max_shard_bytes or not file.has_room(name, dimensions)
            ):
                self._close_shard()
                self._position += 1
        return self._current()

    def _current(self) -> ShardFile:
        if self._file is None:
            left = self._left.pop(self._position, None)
            self._file = ShardFile(self._shard(self._position), left)
        return self._file

    def _close_shard(self) -> None:
        if self._file is None and self._position in self._left:  # all that it lacks is an end
            self._current()
        if self._file is None:
            return
        about = {"names": self._file.names, "nbytes": self._file.nbytes}
        self._shards[self._position] = {**about, **self._file.close()}
        self._file = None

    def join(self) -> None:
        """Wait for all ranks to have written their shards, and learn of them; each must call."""
        self._require_open()
        if self._planned:
            self._close_shard()
        for shards, changed in self.ranks.gather((self._shards, sorted(self.changed))):
            self._shards.update(shards)
            self.changed.update(changed)
        for shard in self._shards.values():
            self._names.update(shard["names"])
        self._left.clear()
        self._planned = False
        self._position = len(self._shards)

    def _shard(self, position: int, count: int = 0) -> Path:
        """Where a shard lies: until their number is known, under a name of its own."""
        path = self.partial / f"shard-{position:05d}.safetensors"
        return path if path.exists() or not count else self.partial / _final(position, count)

    # -- other files ------------------------------------------------------------------------

    def carry(self, shards: Shards) -> list[Path]:
        """Copy what is not weights; what was written already, and config.json, stay as they are."""
        return self._carry(shards.folder, shards.other_files())

    def carry_files(self, folder: Path) -> list[Path]:
        """Copy what is not weights from a folder that need not hold any."""
        return self._carry(folder, other_files(folder))

    def carry_tokenizer(self, folder: Path) -> list[Path]:
        """Copy the files of a tokenizer or processor, and nothing else that lies beside them."""
        return self._carry(folder, tokenizer_files(folder))

    def _carry(self, folder: Path, files: list[Path]) -> list[Path]:
        self._require_open()
        carried = []
        for relative in files:
            target = self.partial / relative
            if str(relative) in (CONFIG, PROVENANCE) or target.exists():
                continue
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / relative, target)
            except OSError as error:
                raise CheckpointError(
                    f"{folder / relative} cannot be copied to {target}: {error.strerror}; the same "
                    "command goes on from its last mark"
                ) from error
            carried.append(relative)
        return carried

    def write_text(self, name: str, text: str) -> None:
        """Write a file of its own; `name` is relative to the output."""
        self._require_open()
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name in (CONFIG, INDEX):
            raise CheckpointError(
                f"{name} cannot be written here: {CONFIG} and {INDEX} come from "
                "finish, and all files lie inside the output"
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
    ) -> Path:
        """Write the config, name the shards, and move the checkpoint into place; return its path.

        check:   called with the complete folder before it is moved; may raise
        changed: tensors to `claim`; all claims go to provenance.json

        Where marks are made, one must say that all tensors are there before this is called.
        From the moment that it is complete it is not removed again: if it cannot be moved into
        place, the error says where it is.
        """
        self._require_open()
        self._close_shard()
        if not self._shards:
            raise CheckpointError(f"no tensor was added to {self.output_dir}")
        self.claim(changed)
        self._record(self.progress, complete=False)
        if self.keep_tokenizer and self.output_dir.is_dir():
            self.carry_tokenizer(self.output_dir)
        (self.partial / CONFIG).write_text(_to_json(config), "utf-8")
        self._name_shards()
        for path in (*self.partial.rglob("*"), self.partial):
            sync(path)
        self._keep = True
        if check is not None:
            check(self.partial)
        write_provenance(
            self.partial, self.source, self.changed
        )  # last, since `check` may add files
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

    def _name_shards(self) -> None:
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for position, shard in sorted(self._shards.items()):
            file = _final(position, count)
            if (path := self._shard(position, count)).name != file:
                path.rename(self.partial / file)
            weight_map.update(dict.fromkeys(shard["names"], file))
        if count > 1:
            total = sum(shard["nbytes"] for shard in self._shards.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.partial / INDEX).write_text(_to_json(index), "utf-8")


def _final(position: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{position + 1:05d}-of-{count:05d}.safetensors"


def quantization_config_dict(config: QuantizationConfig) -> dict[str, Any]:
    """Return what stands under "quantization_config" in config.json, in JSON's own types."""
    content = {
        COMPRESSION_VERSION_NAME: compressed_tensors.__version__,
        QUANTIZATION_METHOD_NAME: QUANTIZATION_METHOD,
        SPARSITY_CONFIG_NAME: {},
        TRANSFORM_CONFIG_NAME: {},
        **config.model_dump(exclude={"quant_method"}),
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def _to_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
