"""A folder of safetensors, read one tensor at a time.

Opening the folder reads headers alone, so a model of any size opens at once, and a folder that is
incomplete or contradicts itself is refused before any work is done with it.
"""

from __future__ import annotations

import mmap
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch

from steelyard.checkpoint.header import (
    DTYPE_NAMES,
    TensorInfo,
    check_name,
    mode_of,
    open_file,
    read_header,
    read_json,
    unreadable,
)
from steelyard.checkpoint.other_files import entries, other_files
from steelyard.errors import CheckpointError
from steelyard.foreign import show

__all__ = ["DTYPE_NAMES", "INDEX", "SINGLE", "Shards", "TensorInfo"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE = 1 << 22
LARGEST_CALL = 1 << 30  # bytes read or written at once; macOS refuses 2 GiB
_NUMBERED = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")


class Shards:
    """Read-only view of a checkpoint; tensors are read when asked for.

    Files are those that the index names; without one, `model.safetensors`, else all that there
    are. `unread` lists the safetensors beside them. A shard may be a link to any file: that lets
    many folders share one copy, and nothing but tensors is taken from it.

    >>> with Shards("SmolLM2-135M") as shards:
    ...     shards.read("model.norm.weight").shape
    torch.Size([576])
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            is_folder = self.folder.is_dir()
        except OSError as error:
            raise unreadable(self.folder, error) from error
        if not is_folder:
            raise CheckpointError(
                f"{self.folder} is not a folder; give the path of a downloaded checkpoint, "
                "for instance what `hf download` prints"
            )
        present = [path for path in entries(self.folder) if path.name.endswith(".safetensors")]
        index = _read_index(self.folder)
        if index is not None:
            self.files = sorted({self.folder / file for file in index.values()})
            self._check_files(present)
        elif self.folder / SINGLE in present:
            self.files = [self.folder / SINGLE]
        else:
            self.files = present
            _check_numbers(self.folder, present)
        if not self.files:
            raise CheckpointError(_no_weights(self.folder))
        self.unread = [file for file in present if file not in self.files]
        self._infos: dict[str, TensorInfo] = {}
        self._states: dict[Path, os.stat_result] = {}
        for file in self.files:
            infos, self._states[file] = read_header(file)
            for info in infos:
                if info.name in self._infos:
                    other = self._infos[info.name].file
                    raise CheckpointError(
                        f"{info.name} is both in {other} and in {file}; remove the file that does "
                        "not belong to this model, or download it again"
                    )
                self._infos[info.name] = info
        if index is not None:
            self._check_index(index)
        self.other_files()  # raises now, not when a long run ends and they are copied
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._open)

    def _check_files(self, present: list[Path]) -> None:
        for file in self.files:
            if not mode_of(file):
                raise CheckpointError(
                    f"{self.folder / INDEX} names {file.name}, which is not there; the download "
                    "is incomplete, run it again"
                )
        single = self.folder / SINGLE
        if single in present and single not in self.files:
            raise CheckpointError(
                f"{self.folder} has {SINGLE} and an index that does not name it; remove whichever "
                "of the two is out of date"
            )

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            if name not in self._infos:
                raise CheckpointError(
                    f"{INDEX} places {name} in {self.folder / file}, which does not hold it; "
                    "download both again, or save the model anew"
                )
            if self._infos[name].file != self.folder / file:
                raise CheckpointError(
                    f"{INDEX} places {name} in {self.folder / file}, but it is in "
                    f"{self._infos[name].file}; download both again, or save the model anew"
                )
        for name, info in self._infos.items():
            if name not in index:
                raise CheckpointError(
                    f"{info.file} holds {name}, which {INDEX} does not list; download both again, "
                    "or save the model anew"
                )

    def names(self) -> list[str]:
        """Return all names in the order of the files, and within a file as the bytes lie."""
        return list(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Return type, shape and size of a tensor without reading it."""
        if name not in self._infos:
            raise CheckpointError(f"{self.folder} holds no tensor {name}")
        return self._infos[name]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory of its own.

        Mapping the file instead would count all that was ever read as memory in use.
        """
        return self.read_stored(self.info(name))

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of a tensor; the others are not read."""
        info = self.info(name)
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        return self.read_stored(
            replace(
                info,
                shape=(stop - start, *info.shape[1:]),
                nbytes=row * (stop - start),
                offset=info.offset + row * start,
            )
        )

    def read_stored(self, info: TensorInfo) -> torch.Tensor:
        """Return what lies where `info` says."""
        try:
            raw = _memory(info.nbytes)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(
                f"{info.name} in {info.file} has {info.nbytes:,} bytes, more than there is memory; "
                "use a machine that has it"
            ) from error
        self._fill(memoryview(raw.numpy()), info, 0)  # type: ignore[arg-type]
        return raw.view(info.dtype).reshape(info.shape)

    def _fill(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Read bytes of a tensor from `start` on until the view is full."""
        file, done = info.file, 0
        if file not in self._open:
            self._open[file] = open_file(file)
        now, before = os.fstat(self._open[file]), self._states[file]
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise CheckpointError(
                f"{file} was changed while it was in use: it has {now.st_size:,} bytes, it had "
                f"{before.st_size:,}; start again when nothing writes to it any more"
            )
        while done < len(view):
            try:
                got = os.preadv(
                    self._open[file], [view[done : done + LARGEST_CALL]], info.offset + start + done
                )
            except OSError as error:
                raise unreadable(file, error) from error
            if got == 0:
                raise CheckpointError(
                    f"{file} ends before {info.name}; it was cut short while it was read, "
                    "download it again"
                )
            done += got

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, a piece at a time; each is overwritten by the next."""
        info = self.info(name)
        buffer = memoryview(bytearray(min(PIECE, info.nbytes)))
        for start in range(0, info.nbytes, PIECE):
            piece = buffer[: min(PIECE, info.nbytes - start)]
            self._fill(piece, info, start)
            yield piece

    def equal(self, name: str, other: Shards) -> bool:
        """Whether two checkpoints hold the same bytes for a tensor; compared piece by piece."""
        if self.info(name).nbytes != other.info(name).nbytes:
            return False
        pairs = zip(self.pieces(name), other.pieces(name), strict=True)
        return all(first == second for first, second in pairs)

    @property
    def total_bytes(self) -> int:
        return sum(info.nbytes for info in self._infos.values())

    def other_files(self) -> list[Path]:
        """Return all that is not weights (config, tokenizer, code), relative to the folder."""
        return other_files(self.folder)

    def close(self) -> None:
        """Let go of the files; a later `read` opens them again."""
        _close_all(self._open)

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_numbers(folder: Path, present: list[Path]) -> None:
    """Refuse shards whose names say that there are more; without an index nothing else does."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in present:
        if match := _NUMBERED.fullmatch(path.name):
            numbers.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), found in numbers.items():
        if len(found) < count:
            first = next(i for i in range(1, count + 1) if i not in found)
            raise CheckpointError(
                f"{folder} holds {len(found)} of {count} files {name}-*, without "
                f"{name}-{first:05d}-of-{count:05d}.safetensors and {INDEX}; the download is "
                "incomplete, run it again"
            )


def _memory(nbytes: int) -> torch.Tensor:
    """Return bytes to read into; in large pages, since entering small ones costs like reading."""
    if nbytes < PIECE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _close_all(handles: dict[Path, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not mode_of(path):
        return None
    try:
        index = read_json(path)
        entries = index.get("weight_map") if isinstance(index, dict) else index
        if not isinstance(entries, dict) or not entries:
            raise ValueError(f"its weight_map is {show(entries)}")
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not an index of tensors to files ({error}); download it again"
        ) from error
    checked = set()
    for name, file in entries.items():
        check_name(path, name)
        if not isinstance(file, str) or file not in checked:
            _check_place(path, name, file)
            checked.add(file)
    return entries


def _check_place(index: Path, name: str, file: object) -> None:
    if not isinstance(file, str) or not file.isprintable() or len(file.encode()) > 255:
        raise CheckpointError(
            f"{index} places {name} in {show(file)}, which is not the name of a file; download it "
            "again"
        )
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    leaves = ".." in (*posix.parts, *windows.parts)
    if leaves or posix.is_absolute() or windows.is_absolute() or windows.drive:
        raise CheckpointError(
            f"{index} places {name} in {file}, outside the folder; do not use this checkpoint "
            "unless you know who made it"
        )
    if posix.suffix != ".safetensors":
        raise CheckpointError(
            f"{index} places {name} in {show(file)}, which is not a *.safetensors; convert the "
            "model, or download the index again"
        )


def _no_weights(folder: Path) -> str:
    pickled = [path.name for path in entries(folder) if path.name.endswith(".bin")]
    if not pickled:
        return f"{folder} holds no *.safetensors; is this the folder of a model?"
    return (
        f"{folder} holds {pickled[0]} but no *.safetensors; convert it: load it with "
        "AutoModelForCausalLM.from_pretrained(...) and save it with "
        "save_pretrained(..., safe_serialization=True)"
    )
