"""A folder of safetensors, read one tensor at a time.

Opening the folder reads only headers, so a model of any size opens at once, and a folder that is
incomplete or contradicts itself is refused before any work is done.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from steelyard.checkpoint.header import TensorInfo, read_header
from steelyard.checkpoint.open_files import LARGEST_CALL, OpenFiles
from steelyard.checkpoint.other_files import other_files
from steelyard.checkpoint.shard_index import check_index, find_shards
from steelyard.checkpoint.untrusted_files import unreadable
from steelyard.errors import CheckpointError

__all__ = ["PIECE", "Shards", "TensorInfo"]

PIECE = 1 << 22


class Shards:
    """Read-only view of a checkpoint that reads tensors on demand.

    Files are those that the index names; without one, `model.safetensors`, else all. `unread` lists
    the other safetensors files. A shard may be a link to any file: that lets many folders share one
    copy, and only tensors are read from it.

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
                f"{self.folder} is not a folder; pass the path of a downloaded checkpoint, "
                "such as `hf download` prints"
            )
        index, self.files, self.unread = find_shards(self.folder)
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
            check_index(self.folder, index, {name: i.file for name, i in self._infos.items()})
        self.other_files()  # raises now, not when a long run ends and they are copied
        self._open = OpenFiles()
        weakref.finalize(self, self._open.close)

    def names(self) -> list[str]:
        """Return all names in the order of the files, within a file in the order of the bytes."""
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
        """Return a tensor in its own memory.

        Mapping the file (`mapped`) would count everything ever read as memory in use.
        """
        return self.read_stored(self.info(name))

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor that is read as far as it is used, such as rows of a large embedding.

        Changes stay in memory.
        """
        info = self.info(name)
        if info.nbytes < PIECE or info.offset % info.dtype.itemsize:
            return self.read(name)
        start = info.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        size = info.offset + info.nbytes - start
        handle = self._descriptor(info.file)
        try:
            pages = mmap.mmap(handle, size, access=mmap.ACCESS_COPY, offset=start)
        except (ValueError, OSError):  # a file system without maps
            return self.read(name)
        raw = torch.frombuffer(pages, dtype=torch.uint8, offset=info.offset - start)
        return raw.view(info.dtype).reshape(info.shape)

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
        """Return the tensor that `info` locates."""
        try:
            raw = _memory(info.nbytes)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(
                f"{info.name} in {info.file} has {info.nbytes:,} bytes, more than the free memory; "
                "use a machine with more"
            ) from error
        self._fill(memoryview(raw.numpy()), info, 0)  # type: ignore[arg-type]
        return raw.view(info.dtype).reshape(info.shape)

    def _fill(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Read bytes of a tensor from `start` on until the view is full."""
        file, done = info.file, 0
        handle = self._descriptor(file)
        while done < len(view):
            try:
                part = view[done : done + LARGEST_CALL]
                got = os.preadv(handle, [part], info.offset + start + done)
            except OSError as error:
                raise unreadable(file, error) from error
            if got == 0:
                raise CheckpointError(
                    f"{file} ends before {info.name}; it was cut short while it was read, "
                    "download it again"
                )
            done += got

    def _descriptor(self, file: Path) -> int:
        """Return the descriptor of a file, which must be as it was when its header was read."""
        handle = self._open.descriptor(file)
        now, before = os.fstat(handle), self._states[file]
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise CheckpointError(
                f"{file} was changed while it was in use: it has {now.st_size:,} bytes, it had "
                f"{before.st_size:,}; start again when nothing writes to it any more"
            )
        return handle

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
        # Python compares views byte by byte, copies of them by one comparison of memory
        return all(bytes(first) == bytes(second) for first, second in pairs)

    @property
    def total_bytes(self) -> int:
        return sum(info.nbytes for info in self._infos.values())

    def other_files(self) -> list[Path]:
        """Return the files other than weights (config, tokenizer, code), relative to the folder."""
        return other_files(self.folder)

    def close(self) -> None:
        """Close the files; a later `read` opens them again."""
        self._open.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _memory(nbytes: int) -> torch.Tensor:
    """Return bytes to read into; in huge pages, since faults of small ones cost like reading."""
    if nbytes < PIECE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
