"""The header of a safetensors file, read as if its author meant harm.

A checkpoint comes from a stranger, so nothing in it is believed before it is checked: not the kind
of file, not the length of the header, not a number in it. What safetensors itself refuses is
refused; where this is stricter, a comment says why.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steelyard.errors import CheckpointError
from steelyard.foreign import show

__all__ = [
    "DTYPE_NAMES",
    "TensorInfo",
    "check_name",
    "mode_of",
    "open_file",
    "read_header",
    "read_json",
    "unreadable",
]

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
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_MAX_JSON = 100_000_000  # bytes; the limit that safetensors has for a header
_MAX_NAME = 1_000  # characters; names are paths of attributes and stay under 200
_MAX_SIZE = 2**63 - 1  # torch counts elements in 64 bits
_FIELDS = ("dtype", "shape", "data_offsets")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_POINTER = "if it is a few lines of text, it is a git-lfs pointer: run `git lfs pull`"


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # of the first byte within the file


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that the system does not give out."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    if number == errno.ENOENT and path.is_symlink():
        return CheckpointError(
            f"{path} is a link to {path.readlink()}, which is not there; the download is "
            "incomplete, run it again, or put the file in the link's place"
        )
    if number == errno.ENOENT:
        return CheckpointError(f"{path} is not there; the download is incomplete, run it again")
    if number == errno.ELOOP or isinstance(error, RuntimeError):  # the latter from Path.resolve
        return CheckpointError(
            f"{path} is a link that leads back to itself; download the checkpoint again"
        )
    if number in (errno.EACCES, errno.EPERM):
        return CheckpointError(f"{path} cannot be read ({reason}); change its permissions")
    return CheckpointError(
        f"{path} cannot be read ({reason}); check the disk that it is on, or download it again"
    )


def mode_of(path: Path) -> int:
    """Return the kind of a path, links not followed; 0 if there is none."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(path, error) from error


def open_file(path: Path) -> int:
    """Return a descriptor of a regular file.

    The kind is looked at before: opening a device can have an effect, and reading one need not
    end. Should it change in between, O_NONBLOCK keeps a pipe from waiting for its other side.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(
                f"{path} is not a file but a folder, a pipe or a device; download the checkpoint "
                "again"
            )
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path, unique: bool = True) -> Any:
    """Return what a file of JSON holds; ValueError if it is none.

    unique: refuse an object with two equal keys
    """
    with os.fdopen(open_file(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > _MAX_JSON:
            raise ValueError(f"it has {size:,} bytes, more than {_MAX_JSON:,}")
        try:
            raw = stream.read(_MAX_JSON)
        except OSError as error:
            raise unreadable(path, error) from error
    return _parse(raw, unique)


def _parse(raw: bytes, unique: bool = True) -> Any:
    """Parse JSON; ValueError for whatever is wrong with it.

    A key that comes twice is refused too, although safetensors takes the last for the name of a
    tensor: which of the two counts depends on the reader.
    """
    try:
        return json.loads(
            raw.decode("utf-8"), parse_int=_integer, object_pairs_hook=_object if unique else None
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has the key {show(twice)} twice")
    return found


def _integer(digits: str) -> int | float:
    """Numbers beyond 64 bits, and -0, become floats as in safetensors, which no field may hold."""
    return int(digits) if len(digits) <= 20 and digits != "-0" else float(digits)


def read_header(file: Path) -> tuple[list[TensorInfo], os.stat_result]:
    """Return the tensors of a file in the order of their bytes, and the state that it was in."""
    with os.fdopen(open_file(file), "rb") as stream:
        try:
            state = os.fstat(stream.fileno())
            if state.st_size < 8:
                raise CheckpointError(
                    f"{file} has {state.st_size} bytes, too few for a safetensors file; the "
                    "download is incomplete, run it again"
                )
            length = int.from_bytes(stream.read(8), "little")
            if length > _MAX_JSON:
                raise CheckpointError(
                    f"{file} is not a safetensors file: its header would have {length:,} bytes, "
                    f"the format allows {_MAX_JSON:,}; {_POINTER}"
                )
            if 8 + length > state.st_size:
                raise CheckpointError(
                    f"{file} has {state.st_size:,} bytes, its header alone takes "
                    f"{8 + length:,}; the download is incomplete, run it again"
                )
            raw = stream.read(length)
        except OSError as error:
            raise unreadable(file, error) from error
    try:
        header = _parse(raw)
        if not isinstance(header, dict):
            raise ValueError(f"its header is {show(header)}, not an object")
    except ValueError as error:
        raise CheckpointError(f"{file} is not a safetensors file ({error}); {_POINTER}") from error
    _check_metadata(file, header.pop("__metadata__", None))
    infos = [_tensor_info(file, name, entry, 8 + length) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_coverage(file, infos, 8 + length, state.st_size)
    return infos, state


def _check_metadata(file: Path, metadata: object) -> None:
    if metadata is None:
        return
    if isinstance(metadata, dict):
        texts = (*metadata, *metadata.values())
        if all(isinstance(text, str) and not _SURROGATE.search(text) for text in texts):
            return
    raise CheckpointError(
        f"{file} has __metadata__ {show(metadata)}, which is not a map of text to text; save the "
        "model anew"
    )


def _check_coverage(file: Path, infos: list[TensorInfo], base: int, size: int) -> None:
    """Every byte belongs to exactly one tensor, and the last byte of the last ends the file."""
    end, before = base, "the header"
    for info in infos:
        if info.offset != end:
            wrong = "overlaps" if info.offset < end else "leaves a gap after"
            raise CheckpointError(
                f"{info.name} in {file} has its data at {info.offset - base:,} where "
                f"{end - base:,} is due, so it {wrong} {before}; download the file again, or save "
                "the model anew"
            )
        end, before = info.offset + info.nbytes, info.name
    if size != end:
        cause = "the download is incomplete, run it again"
        if size > end:
            cause = "no tensor owns the rest, download it again"
        raise CheckpointError(f"{file} has {size:,} bytes, its header promises {end:,}; {cause}")


def check_name(file: Path, name: str) -> None:
    """Refuse a name that a message or a report could not print as it is.

    safetensors takes any; but an empty one belongs to no module, and control or formatting
    characters would let a checkpoint write what it likes on the terminal.
    """
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise CheckpointError(
            f"{file} names a tensor {show(name)}, of {len(name):,} characters; a name has 1 to "
            f"{_MAX_NAME:,} that can be printed: rename it and save the model anew"
        )


def _tensor_info(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    check_name(file, name)
    # safetensors skips fields that it does not know. One of these would be there to change what
    # the bytes mean; and it reads a list of three values, an accident of its parser.
    if not isinstance(entry, dict) or entry.keys() != {*_FIELDS}:
        what = f"the fields {show([*entry])}" if isinstance(entry, dict) else f"{show(entry)}"
        raise CheckpointError(
            f"{name} in {file} has {what} where {', '.join(_FIELDS)} are due; save the model anew"
        )
    kind, shape, offsets = (entry[field] for field in _FIELDS)
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise CheckpointError(
            f"{name} in {file} has type {show(kind)}; convert it to one of {', '.join(_DTYPES)}"
        )
    if not _is_sizes(shape) or (elements := _product(shape)) is None:
        raise CheckpointError(
            f"{name} in {file} has shape {show(shape)}, which is not a list of whole numbers "
            "whose product fits into 64 bits; download the file again, or save the model anew"
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{name} in {file} has data_offsets {show(offsets)}, which is not a start and an end "
            "in bytes; download the file again, or save the model anew"
        )
    start, stop = offsets
    dtype = _DTYPES[kind]
    if stop - start != elements * dtype.itemsize:
        raise CheckpointError(
            f"{name} in {file} has shape {show(shape)} and type {kind}, which take "
            f"{elements * dtype.itemsize:,} bytes, but data_offsets {show(offsets)} span "
            f"{stop - start:,}; download the file again, or save the model anew"
        )
    return TensorInfo(name, file, dtype, tuple(shape), stop - start, base + start)


def _is_sizes(value: object) -> bool:
    """Whether it is a list of integers from 0; `type`, for True is an int too."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _product(shape: list[int]) -> int | None:
    """Return the number of elements; None if torch cannot hold the shape.

    Stops at the first product that is too large: that of a million sizes takes minutes. Zeros do
    not hide the others, as the strides of an empty tensor are computed all the same.
    """
    product = 1
    for size in shape:
        product *= size or 1
        if product > _MAX_SIZE:
            return None
    return 0 if 0 in shape else product
