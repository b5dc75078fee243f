"""Reads the header of a safetensors file as untrusted input.

It refuses everything that safetensors refuses; where it is stricter, a comment says why.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.untrusted_files import MAX_JSON, open_file, parse_json, unreadable
from steelyard.errors import CheckpointError
from steelyard.foreign import show

__all__ = ["DTYPE_NAMES", "TensorInfo", "check_name", "read_header"]

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

_MAX_NAME = 1_000  # characters; names are paths of attributes and stay under 200
_MAX_SIZE = 2**63 - 1  # torch counts elements in 64 bits
_FIELDS = ("dtype", "shape", "data_offsets")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_POINTER = "if it is a few lines of text, it is a git-lfs pointer: run `git lfs pull`"


@dataclass(frozen=True)
class TensorInfo:
    """Type, shape and place of one tensor."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # of the first byte within the file


def read_header(file: Path) -> tuple[list[TensorInfo], os.stat_result]:
    """Return the tensors of a file in the order of their bytes, and the file's state."""
    with os.fdopen(open_file(file), "rb") as stream:
        try:
            state = os.fstat(stream.fileno())
            if state.st_size < 8:
                raise CheckpointError(
                    f"{file} has {state.st_size} bytes, too few for a safetensors file; the "
                    "download is incomplete, run it again"
                )
            length = int.from_bytes(stream.read(8), "little")
            if length > MAX_JSON:
                raise CheckpointError(
                    f"{file} is not a safetensors file: its header would have {length:,} bytes, "
                    f"the format allows {MAX_JSON:,}; {_POINTER}"
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
        header = parse_json(raw)
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
        "model again"
    )


def _check_coverage(file: Path, infos: list[TensorInfo], base: int, size: int) -> None:
    """Every byte belongs to exactly one tensor, and the last byte of the last ends the file."""
    end, before = base, "the header"
    for info in infos:
        if info.offset != end:
            wrong = "overlaps" if info.offset < end else "leaves a gap after"
            raise CheckpointError(
                f"{info.name} in {file} has its data at {info.offset - base:,}, expected "
                f"{end - base:,}, so it {wrong} {before}; download the file again, or save "
                "the model again"
            )
        end, before = info.offset + info.nbytes, info.name
    if size != end:
        cause = "the download is incomplete, run it again"
        if size > end:
            cause = "no tensor owns the rest, download it again"
        raise CheckpointError(f"{file} has {size:,} bytes, its header promises {end:,}; {cause}")


def check_name(file: Path, name: str) -> None:
    """Refuse a name that a message or a report cannot print unescaped.

    safetensors accepts any; but an empty one belongs to no module, and control or formatting
    characters would let a checkpoint write anything to the terminal.
    """
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise CheckpointError(
            f"{file} names a tensor {show(name)}, of {len(name):,} characters; a name has 1 to "
            f"{_MAX_NAME:,} that can be printed: rename it and save the model again"
        )


def _tensor_info(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    check_name(file, name)
    # safetensors skips unknown fields, but such a field could change the meaning of the bytes; and
    # it accepts a list of three values, an accident of its parser.
    if not isinstance(entry, dict) or entry.keys() != {*_FIELDS}:
        what = f"the fields {show([*entry])}" if isinstance(entry, dict) else f"{show(entry)}"
        raise CheckpointError(
            f"{name} in {file} has {what}, expected {', '.join(_FIELDS)}; save the model again"
        )
    kind, shape, offsets = (entry[field] for field in _FIELDS)
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise CheckpointError(
            f"{name} in {file} has type {show(kind)}; convert it to one of {', '.join(_DTYPES)}"
        )
    if not _is_sizes(shape) or (elements := _product(shape)) is None:
        raise CheckpointError(
            f"{name} in {file} has shape {show(shape)}, which is not a list of whole numbers "
            "whose product fits into 64 bits; download the file again, or save the model again"
        )
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{name} in {file} has data_offsets {show(offsets)}, which is not a start and an end "
            "in bytes; download the file again, or save the model again"
        )
    start, stop = offsets
    dtype = _DTYPES[kind]
    if stop - start != elements * dtype.itemsize:
        raise CheckpointError(
            f"{name} in {file} has shape {show(shape)} and type {kind}, which take "
            f"{elements * dtype.itemsize:,} bytes, but data_offsets {show(offsets)} span "
            f"{stop - start:,}; download the file again, or save the model again"
        )
    return TensorInfo(name, file, dtype, tuple(shape), stop - start, base + start)


def _is_sizes(value: object) -> bool:
    """Whether it is a list of integers >= 0; compares `type`, since True is an int too."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _product(shape: list[int]) -> int | None:
    """Return the number of elements; None if torch cannot hold the shape.

    Stops at the first product that is too large: the product of a million sizes takes minutes.
    Zeros do not hide the others, since torch computes the strides of an empty tensor too.
    """
    product = 1
    for size in shape:
        product *= size or 1
        if product > _MAX_SIZE:
            return None
    return 0 if 0 in shape else product
