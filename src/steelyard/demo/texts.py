"""Texts for the demo model: the installed standard library, in two splits.

The demo model was trained on the Python files of the standard library, which are read from the
running Python's installation. A hash of a file's name decides its split, so a file is in the same
split on every machine and in every version of Python:

    train      the model was trained on these; calibration texts come from here
    held_out   the model has never seen these; evaluation texts come from here

Excluded are tests, generated tables (codecs, topics of the help) and files that depend on the
machine (site-packages, build settings).
"""

from __future__ import annotations

import hashlib
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from steelyard.errors import DataError

__all__ = [
    "Part",
    "built_in_texts",
    "calibration_texts",
    "held_out_texts",
    "library_files",
    "part_of",
]

Part = Literal["train", "held_out"]

HELD_OUT_ONE_IN = 12
_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"})


def part_of(name: str) -> Part:
    """Return the split of the file `name`, its path inside the library with forward slashes.

    >>> part_of("json/decoder.py"), part_of("json/scanner.py")
    ('train', 'held_out')
    """
    digest = hashlib.sha256(name.encode()).digest()
    return "held_out" if int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0 else "train"


def library_files(part: Part, root: Path | None = None) -> dict[str, Path]:
    """Return the files of the split `part` by name, sorted.

    root: the folder of the standard library; by default that of the running Python
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found = {path.relative_to(root).as_posix(): path for path in _python_files(root)}
    files = {
        name: found[name]
        for name in sorted(found)
        if part_of(name) == part and not _EXCLUDED.intersection(name.split("/"))
    }
    if not files:
        raise DataError(
            f"no Python files of the standard library in {root}: "
            "use a Python that is installed with its library as .py files"
        )
    return files


def calibration_texts(count: int, seed: int = 0, *, characters: int = 2048) -> list[str]:
    """Return `count` texts from the files that the demo model was trained on.

    A text consists of whole lines of one file and has at most `characters`; no two overlap. With
    one version of Python, a seed always gives the same texts; a larger count only adds more.
    """
    return _texts("train", count, seed, characters)


def held_out_texts(count: int, seed: int = 0, *, characters: int = 2048) -> list[str]:
    """Return `count` texts from the held-out files, selected as in `calibration_texts`."""
    return _texts("held_out", count, seed, characters)


def built_in_texts(characters: int) -> list[str]:
    """Return all calibration texts, of at most `characters` each, in the order of the files."""
    files = library_files("train").values()
    return [piece for path in files for piece in _pieces(path.read_text("utf-8"), characters)]


def _python_files(root: Path) -> Iterator[Path]:
    """Yield the files of the library's modules; ignore other files in `root`."""
    for entry in root.iterdir():
        if entry.name.removesuffix(".py") in sys.stdlib_module_names:
            yield from entry.rglob("*.py") if entry.is_dir() else [entry]


def _texts(part: Part, count: int, seed: int, characters: int) -> list[str]:
    files = library_files(part)
    pieces = [
        piece for path in files.values() for piece in _pieces(path.read_text("utf-8"), characters)
    ]
    if not 0 < count <= len(pieces):
        raise DataError(
            f"count is {count}, but {part} holds {len(pieces)} texts of {characters} characters; "
            f"pass 1 to {len(pieces)}, or fewer characters"
        )
    random.Random(seed).shuffle(pieces)
    return pieces[:count]


def _pieces(text: str, characters: int) -> Iterator[str]:
    """Split `text` at ends of lines into pieces of at most `characters`.

    Drop pieces shorter than half of that: the end of a file, or the text before a very long line.
    """
    piece = ""
    for line in text.splitlines(keepends=True):
        if len(piece) + len(line) > characters:
            if 2 * len(piece) >= characters:
                yield piece
            piece = ""
        if len(line) <= characters:
            piece += line
    if 2 * len(piece) >= characters:
        yield piece
