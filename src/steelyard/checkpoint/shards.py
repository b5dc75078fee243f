"""A folder of safetensors, read one tensor at a time.

Opening the folder reads headers alone, so a model of any size opens at once, and a folder that is
incomplete or contradicts itself is refused before any work is done with it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from steelyard.errors import CheckpointError

__all__ = ["Shards", "TensorInfo"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_NOT_MODEL = {".git", ".cache"}  # what git and the hub's downloader leave beside a model

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
PIECE = 1 << 22
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # of the first byte within the file


class Shards:
    """Read-only view of a checkpoint; tensors are read when asked for.

    Files are those that the index names; without one, `model.safetensors`, else all that there
    are. `unread` lists the safetensors beside them.

    >>> with Shards("SmolLM2-135M") as shards:
    ...     shards.read("model.norm.weight").shape
    torch.Size([576])
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not a folder; give the path of a downloaded checkpoint, "
                "for instance what `hf download` prints"
            )
        present = sorted(self.folder.glob("*.safetensors"))
        index = _read_index(self.folder)
        if index is not None:
            self.files = [self.folder / file for file in sorted(set(index.values()))]
            self._check_files(present)
        elif self.folder / SINGLE in present:
            self.files = [self.folder / SINGLE]
        else:
            self.files = present
        if not self.files:
            raise CheckpointError(_no_weights(self.folder))
        self.unread = [file for file in present if file not in self.files]
        self._infos: dict[str, TensorInfo] = {}
        for file in self.files:
            for info in _read_header(file):
                if info.name in self._infos:
                    other = self._infos[info.name].file
                    raise CheckpointError(
                        f"{info.name} is both in {other} and in {file}; remove the file that does "
                        "not belong to this model, or download it again"
                    )
                self._infos[info.name] = info
        if index is not None:
            self._check_index(index)
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._open)

    def _check_files(self, present: list[Path]) -> None:
        for file in self.files:
            if not file.is_file():
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

    def read_stored(self, info: TensorInfo) -> torch.Tensor:
        """Return what lies where `info` says."""
        raw = _memory(info.nbytes)
        self._fill(memoryview(raw.numpy()), info)  # type: ignore[arg-type]
        return raw.view(info.dtype).reshape(info.shape)

    def _fill(self, view: memoryview, info: TensorInfo, start: int = 0) -> None:
        """Read the bytes of a tensor from `start` on into `view`."""
        if info.file not in self._open:
            self._open[info.file] = os.open(info.file, os.O_RDONLY)
        done = 0
        while done < len(view):
            place = info.offset + start + done
            got = os.preadv(self._open[info.file], [view[done:]], place)
            if got == 0:
                raise CheckpointError(
                    f"{info.file} ends before {info.name}; it was cut short while it was read"
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


def other_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are not weights, relative to it."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not _is_weights(path) and not _NOT_MODEL & {*relative.parts}:
            found.append(relative)
    return found


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


def _is_weights(path: Path) -> bool:
    name = path.name.removesuffix(".index.json")
    return name.endswith(_WEIGHTS)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text("utf-8"))["weight_map"]
        entries = {str(name): str(file) for name, file in index.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not an index of tensors to files ({error}); download it again"
        ) from error
    for name, file in entries.items():
        posix, windows = PurePosixPath(file), PureWindowsPath(file)
        leaves = ".." in (*posix.parts, *windows.parts)
        if leaves or posix.is_absolute() or windows.is_absolute() or windows.drive:
            raise CheckpointError(
                f"{path} places {name} in {file}, outside the folder; do not use this checkpoint "
                "unless you know who made it"
            )
    return entries


def _read_header(file: Path) -> list[TensorInfo]:
    """Return the tensors of a file in the order of their bytes."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, size)))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        end = max((entry["data_offsets"][1] for _, entry in entries), default=0)
        infos = [_tensor_info(file, name, entry, 8 + length) for name, entry in entries]
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{file} is not a safetensors file ({error}); if it is a few lines of text, it is a "
            "git-lfs pointer: run `git lfs pull`"
        ) from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{file} has {size:,} bytes, its header promises {8 + length + end:,}; the download is "
            "incomplete, run it again"
        )
    return infos


def _tensor_info(file: Path, name: str, entry: dict[str, Any], base: int) -> TensorInfo:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{name} in {file} has type {entry['dtype']}; known: {', '.join(_DTYPES)}"
        )
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has shape {shape} but {stop - start} bytes")
    return TensorInfo(name, file, dtype, shape, stop - start, base + start)


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if not pickled:
        return f"{folder} holds no *.safetensors; is this the folder of a model?"
    return (
        f"{folder} holds {pickled[0]} but no *.safetensors; convert it: load it with "
        "AutoModelForCausalLM.from_pretrained(...) and save it with "
        "save_pretrained(..., safe_serialization=True)"
    )
