"""The shards of a checkpoint while it is written: assigns tensors to them, and completes them.

Until their number is known, shards have temporary names; `name_all` gives them those of the format,
and writes the index.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.shard_file import ShardFile, is_whole
from steelyard.checkpoint.shard_index import INDEX, SINGLE
from steelyard.checkpoint.shards import Shards
from steelyard.errors import CheckpointError

__all__ = ["GrowingShards", "are_in_place"]

Record = dict[str, Any]
"""Names, sizes and checksums of a shard, as in the journal."""


class GrowingShards:
    """Shards in a folder.

    max_bytes:  a shard holds at most this much, or one tensor that is larger
    complete:   position -> record of a complete shard
    incomplete: position -> state of a shard that an earlier run was writing
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.complete: dict[int, Record] = {}
        self.incomplete: dict[int, Record] = {}
        self.names: set[str] = set()
        self._file: ShardFile | None = None  # the shard that is being written
        self._position = 0  # its number
        self._planned = False  # the caller assigns tensors to shards

    # -- tensors ------------------------------------------------------------------------------

    def file_for(self, name: str, nbytes: int, dimensions: int) -> ShardFile:
        """Return the file to write a tensor of this size to."""
        if name in self.names:
            raise CheckpointError(f"{name} was added to the checkpoint twice")
        self.names.add(name)
        if not self._planned:
            self._position = len(self.complete)
            file = self._current()
            if file.names and (
                file.nbytes + nbytes > self.max_bytes or not file.has_room(name, dimensions)
            ):
                self.end_current()
                self._position += 1
        return self._current()

    def at(self, position: int) -> None:
        """Write the tensors that follow to this shard."""
        if self._planned and position != self._position:
            self.end_current()
        self._planned, self._position = True, position

    def _current(self) -> ShardFile:
        if self._file is None:
            state = self.incomplete.pop(self._position, None)
            self._file = ShardFile(self._path(self._position), state)
        return self._file

    def end_current(self) -> None:
        """Complete the shard that is being written, if there is one."""
        if self._file is None and self._position in self.incomplete:  # only its header is missing
            self._current()
        if self._file is None:
            return
        about = {"names": self._file.names, "nbytes": self._file.nbytes}
        self.complete[self._position] = {**about, **self._file.close()}
        self._file = None

    def join(self, others: Iterable[Mapping[int, Record]]) -> None:
        """Add the complete shards of other ranks; the tensors that follow go to new shards."""
        for complete in others:
            self.complete.update(complete)
        self.incomplete.clear()
        self._note_names()
        self._planned = False

    def end_planned(self) -> None:
        """Complete the current shard if the caller chose it with `at`."""
        if self._planned:
            self.end_current()

    def abandon(self) -> None:
        """Close the current file without completing it."""
        if self._file is not None:
            self._file.abandon()

    # -- resuming -----------------------------------------------------------------------------

    def open_states(self) -> dict[int, Record]:
        """Return the state of each incomplete shard; its bytes are on the disk."""
        states = dict(self.incomplete)
        if self._file is not None:
            states[self._position] = self._file.state()
        return states

    def rewrite(self, written: Shards, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the complete shards that hold these tensors again, with these values.

        The new files have temporary names, next to the old ones with their final names, until
        `name_all` moves them there.
        """
        missing = sorted(tensors.keys() - self.names)
        if missing:
            raise CheckpointError(f"{missing[0]} cannot be replaced: the checkpoint has none")
        renewed: dict[int, Record] = {}
        for position, shard in self.complete.items():
            if tensors.keys().isdisjoint(shard["names"]):
                continue
            file = ShardFile(self._temporary(position))
            for name in shard["names"]:
                info = written.info(name)
                if name not in tensors:
                    file.add_pieces(name, info.dtype, info.shape, written.pieces(name))
                    continue
                tensor = tensors[name].detach().cpu().contiguous()
                if (tensor.dtype, tuple(tensor.shape)) != (info.dtype, info.shape):
                    raise CheckpointError(
                        f"{name} is {info.dtype} {info.shape}, and cannot become {tensor.dtype} "
                        f"{tuple(tensor.shape)}"
                    )
                file.add(name, tensor)
            renewed[position] = {"names": file.names, "nbytes": file.nbytes, **file.close()}
        self.complete.update(renewed)

    def adopt(self, complete: dict[int, Record], incomplete: dict[int, Record]) -> None:
        """Start from the shards that the first rank restored."""
        self.complete, self.incomplete = complete, incomplete
        self._note_names()

    def restore(self, journals: Iterable[Mapping[str, Any]]) -> None:
        """Start from the journals of an earlier run; remove files that they do not list."""
        for journal in journals:
            self.complete.update({int(i): shard for i, shard in journal["shards"].items()})
            for i, state in journal["open"].items():
                known = self.incomplete.get(int(i))
                if known is None or len(known["names"]) < len(state["names"]):
                    self.incomplete[int(i)] = state
        for position, shard in self.complete.items():
            self.incomplete.pop(position, None)
            temporary = self._temporary(position)
            if is_whole(temporary, shard):
                continue
            if (final := self.folder / _final(position, len(self.complete))).exists():
                temporary.unlink(missing_ok=True)  # it was to replace the final one
            if not is_whole(final, shard):
                raise CheckpointError(
                    f"{self._path(position)} was changed after the run stopped; start anew with "
                    "resume=False"
                )
        self._remove_others()

    def _remove_others(self) -> None:
        count = len(self.complete)
        kept = {self._path(position, count) for position in self.complete}
        kept |= {self._path(position) for position in self.incomplete}
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path not in kept:
                path.unlink()

    def _note_names(self) -> None:
        for shard in (*self.complete.values(), *self.incomplete.values()):
            self.names.update(shard["names"])
        self._position = len(self.complete)

    # -- files --------------------------------------------------------------------------------

    def name_all(self) -> None:
        """Give all shards their final names, and write the index where there are several."""
        count = len(self.complete)
        weight_map: dict[str, str] = {}
        for position, shard in sorted(self.complete.items()):
            file = _final(position, count)
            if (path := self._path(position, count)).name != file:
                path.rename(self.folder / file)
            weight_map.update(dict.fromkeys(shard["names"], file))
        if count > 1:
            total = sum(shard["nbytes"] for shard in self.complete.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.folder / INDEX).write_text(text, "utf-8")

    def _path(self, position: int, count: int = 0) -> Path:
        """Return the path of a shard; `count` is the number of all shards, 0 if not known yet."""
        path = self._temporary(position)
        return path if path.exists() or not count else self.folder / _final(position, count)

    def _temporary(self, position: int) -> Path:
        return self.folder / f"shard-{position:05d}.safetensors"


def are_in_place(folder: Path, complete: Mapping[int, Record]) -> bool:
    """Whether a folder holds all of these shards under their final names."""
    count = len(complete)
    return all(is_whole(folder / _final(int(i), count), s) for i, s in complete.items())


def _final(position: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{position + 1:05d}-of-{count:05d}.safetensors"
