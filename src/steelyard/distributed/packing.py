"""Serializes the values that ranks send to each other: JSON, then tensors.

Unlike a pickle, received data is never executed. A message is the length of its JSON (8 bytes), the
JSON, and the bytes of all tensors one after another. A type that JSON lacks is an object with one
key, its kind:

    {"tuple": [1, 2]}   {"dict": [["a", 1], ["b", 2]]}   {"tensor": ["bfloat16", [2, 3], 0, 12]}

A dataclass is sent by the names of its fields, if it was declared `sendable`. A tensor that goes
from device to device (`device_channel`) is not part of the bytes: {"apart": 0} is the first.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from steelyard.distributed.local_device import group_device
from steelyard.errors import RanksError

__all__ = ["Apart", "gather_unwatched", "pack", "sendable", "tensors_apart", "unpack"]

Class = TypeVar("Class", bound=type)

_LENGTH = 8
_SENDABLE: dict[str, type] = {}


def sendable(kind: Class) -> Class:
    """Declare a dataclass that ranks may send; all ranks must declare it."""
    _SENDABLE[kind.__name__] = kind
    return kind


@dataclasses.dataclass
class Apart:
    """Tensors of a message that travel apart from its bytes: those on `device`."""

    device: torch.device | None = None
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)


def pack(value: Any, apart: Apart | None = None) -> torch.Tensor:
    """Return a value as bytes, (n,) uint8.

    apart: receives the tensors that are not part of the bytes
    """
    encoder = _Encoder(apart or Apart())
    content = encoder.encode(value)
    described = [[_name(t.dtype), list(t.shape)] for t in encoder.apart.tensors]
    text = json.dumps([content, described], separators=(",", ":")).encode()
    head = bytearray(len(text).to_bytes(_LENGTH, "little") + text)
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *encoder.tensors])


def tensors_apart(data: torch.Tensor) -> list[tuple[torch.dtype, list[int]]]:
    """Return type and shape of the tensors that travel apart from the bytes of `pack`."""
    with _decoding():
        (_, described), _ = _split(data)
        return [(_dtype(name), list(shape)) for name, shape in described]


def unpack(data: torch.Tensor, apart: Sequence[torch.Tensor] = ()) -> Any:
    """Return the value that `pack` serialized; its tensors own their memory.

    apart: the tensors that were not part of the bytes, which become part of the value
    """
    with _decoding():
        (content, _), rest = _split(data)
        return _decoded(content, rest, apart)


def _split(data: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return the JSON of a message, and the bytes of its tensors."""
    start = _LENGTH + int.from_bytes(data[:_LENGTH].numpy().tobytes(), "little")
    found = json.loads(data[_LENGTH:start].numpy().tobytes())
    if not isinstance(found, list):
        raise TypeError(f"a list was expected, not {type(found).__name__}")
    return found, data[start:]


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise RanksError(
            f"another rank sent a message that this one cannot decode ({type(error).__name__}: "
            f"{error}); start all ranks with the same version of Steelyard"
        ) from error


def gather_unwatched(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order, through the default process group.

    Does not watch for ranks that fail, unlike `Ranks.gather`.
    """
    device = group_device()
    own = pack(value).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [unpack(each[: int(n)].cpu()) for each, n in zip(found, sizes, strict=True)]


class _Encoder:
    """Turns values into JSON types.

    tensors: the bytes of their tensors
    apart:   the tensors that are not sent as bytes
    """

    def __init__(self, apart: Apart) -> None:
        self.apart = apart
        self.tensors: list[torch.Tensor] = []
        self.nbytes = 0

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(each) for each in value]
        if kind in (tuple, torch.Size):
            return {"tuple": [self.encode(each) for each in value]}
        if kind is dict:
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if isinstance(value, torch.Tensor):
            if value.device == self.apart.device and value.numel():
                self.apart.tensors.append(value.detach().contiguous())
                return {"apart": len(self.apart.tensors) - 1}
            return {"tensor": self._tensor(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is torch.dtype:
            return {"dtype": _name(value)}
        if isinstance(value, Path):
            return {"path": str(value)}
        if _SENDABLE.get(kind.__name__) is kind:
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return {kind.__name__: {name: self.encode(each) for name, each in fields.items()}}
        raise TypeError(f"ranks cannot send a {kind.__qualname__}; declare it with @sendable")

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        start = self.nbytes
        self.tensors.append(flat)
        self.nbytes += len(flat)
        return [_name(value.dtype), list(value.shape), start, self.nbytes]


def _decoded(content: Any, data: torch.Tensor, apart: Sequence[torch.Tensor]) -> Any:
    if isinstance(content, list):
        return [_decoded(each, data, apart) for each in content]
    if not isinstance(content, dict):
        return content
    ((kind, inner),) = content.items()
    if kind == "tuple":
        return tuple(_decoded(each, data, apart) for each in inner)
    if kind == "dict":
        return {_decoded(k, data, apart): _decoded(v, data, apart) for k, v in inner}
    if kind == "tensor":
        name, shape, start, stop = inner
        # a copy, since the offset in the message may be unaligned for the type
        return data[start:stop].clone().view(_dtype(name)).reshape(shape)
    if kind == "apart":
        return apart[inner]
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "dtype":
        return _dtype(inner)
    if kind == "path":
        return Path(inner)
    return _SENDABLE[kind](**{name: _decoded(each, data, apart) for name, each in inner.items()})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no type {name}")
    return found
