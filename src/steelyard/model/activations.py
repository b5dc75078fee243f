"""Where hidden states live between two layers: on the device, in host memory, or in files.

Those of all samples take tokens x hidden size x bytes of the type. They stay on the device while
they fit, then in host memory, then in temporary files that are mapped into memory. A copy has the
same bits, so the place changes no result.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from steelyard.distributed import local_count
from steelyard.model.placement import CPU, free_bytes
from steelyard.words import size

__all__ = ["Fetched", "HiddenStates", "Room", "fetched", "room_for"]

_SHARE = 4  # of the free memory that hidden states may take, a quarter


@dataclass(frozen=True)
class Room:
    """Bytes that hidden states may take on the device and in host memory; beyond both, files.

    On a CPU, the device has no memory of its own.
    """

    device: int = 0
    host: int = sys.maxsize

    def text(self, nbytes: int, device: torch.device) -> str:
        """Say where hidden states of at most so many bytes will live, for the plan."""
        named = [(f"on {device}", self.device), ("in host memory", self.host)]
        places = [each for each in named if each[1]]
        words, left = [], nbytes
        for place, room in places:
            if left <= room:
                words.append(place)
                break
            words.append(f"{size(room)} {place}")
            left -= room
        else:
            words.append("in files of TMPDIR")
        return f"hidden states, at most {size(nbytes)}: {', then '.join(words)}"


def room_for(asked: str, device: torch.device) -> Room:
    """Return the room for hidden states.

    asked: auto takes a quarter of the free memory of the device, then of the host's, which the
           ranks on it share; device, host and disk put all into one place
    """
    own = device.type != CPU.type
    if asked == "auto":
        host = free_bytes(CPU) // _SHARE // local_count()
        return Room(free_bytes(device) // _SHARE if own else 0, host)
    if asked == "device" and own:
        return Room(sys.maxsize)
    return Room(0, 0 if asked == "disk" else sys.maxsize)


def fetched(value: Any) -> Any:
    """Return a stored tensor where it is computed with; anything else as it is."""
    home = getattr(value, "_computed_on", None)
    return value if home is None else value.to(home)


class Fetched(Sequence[tuple[torch.Tensor, ...]]):
    """Stored tensors in tuples, each brought to where it is computed with when it is read."""

    def __init__(self, stored: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._stored = stored

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Fetched(self._stored[index])
        return tuple(map(fetched, self._stored[index]))


class HiddenStates:
    """Storage for hidden states; files are removed on exit.

    room:   bytes on the device and in host memory
    nbytes: total size, as far as it is known in advance; if it is more than the room, all that do
            not fit on the device go to files. Otherwise, files begin when the room is used up.
    """

    def __init__(self, room: Room, nbytes: int = 0) -> None:
        self.room = room
        self.spilled = nbytes > room.device + room.host
        self._used = {"device": 0, "host": 0}
        self._lock = threading.RLock()  # a tensor may be freed while another is counted
        self._stack = contextlib.ExitStack()
        self._files = 0

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def beside(self) -> HiddenStates:
        """Return storage for another model in the same room; its files end on their own."""
        other = HiddenStates(self.room)
        other.spilled, other._used, other._lock = self.spilled, self._used, self._lock
        return other

    @cached_property
    def _folder(self) -> Path:
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    def put(self, value: Any, home: torch.device | None = None) -> Any:
        """Store a tensor, and return the stored one, for `fetched`; anything else as it is.

        Its room is free again when the last reference to it is gone.

        home: the device that it is computed with; by default the one that it is on
        """
        if not isinstance(value, torch.Tensor) or hasattr(value, "_computed_on"):
            return value  # a stored one is not stored again
        home = value.device if home is None else home
        if home.type != CPU.type and self._counted("device", self.room.device, value.nbytes):
            return self._kept(value.to(home), "device", home)
        if not self.spilled and self._counted("host", self.room.host, value.nbytes):
            return self._kept(value.to(CPU), "host", home)
        self.spilled = True
        return self._in_file(value, home)

    def _counted(self, place: str, room: int, nbytes: int) -> bool:
        """Count bytes in a place, if they fit."""
        with self._lock:
            fits = self._used[place] + nbytes <= room
            self._used[place] += nbytes if fits else 0
            return fits

    def _kept(self, stored: torch.Tensor, place: str, home: torch.device) -> torch.Tensor:
        stored = stored.view_as(stored)  # one of its own, whose end is that of the stored state
        weakref.finalize(stored, self._freed, place, stored.nbytes).atexit = False
        return _computed_on(stored, home)

    def _freed(self, place: str, nbytes: int) -> None:
        with self._lock:
            self._used[place] -= nbytes

    def _in_file(self, value: torch.Tensor, home: torch.device) -> torch.Tensor:
        path = self._folder / str(self._files)
        self._files += 1
        path.touch()
        mapped = torch.empty(0, dtype=value.dtype)
        if value.numel():
            mapped = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype)
        stored = mapped.view(value.shape).copy_(value)
        weakref.finalize(stored, _removed, path).atexit = False  # the folder goes as a whole
        return _computed_on(stored, home)


def _computed_on(stored: torch.Tensor, home: torch.device) -> torch.Tensor:
    stored._computed_on = home  # type: ignore[attr-defined]
    return stored


def _removed(path: Path) -> None:
    with contextlib.suppress(OSError):  # some systems keep a file that is mapped
        path.unlink()
