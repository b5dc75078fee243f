"""Applies a function to each row before it is read: a caller's own, or that of a known dataset."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.data.data_files import Row
from steelyard.errors import DataError
from steelyard.foreign import reason_of

__all__ = ["IndexedMappedRows", "MappedRows", "row_function"]

Function = Callable[[Any], Any]


class MappedRows:
    """Rows in order, each changed by a function."""

    def __init__(self, rows: Any, function: Function) -> None:
        self.name = rows.name
        self._rows = rows
        self._function = function

    def __iter__(self) -> Iterator[Row]:
        return map(self._mapped, self._rows)

    def _mapped(self, located: Row) -> Row:
        where, row = located
        if row is None:
            return located
        try:
            return where, self._function(row)
        except Exception as error:  # whatever the function raises
            raise DataError(f"{where}: preprocessing fails ({reason_of(error)})") from error


class IndexedMappedRows(MappedRows):
    """The same, for rows that can be selected by index."""

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, indices: Sequence[int]) -> Iterator[Row]:
        return map(self._mapped, self._rows.fetch(indices))


def row_function(given: str | Function | None) -> Function | None:
    """Return `preprocessing_func` as a function whose columns are added to those of the row."""
    if given is None:
        return None
    function = given if callable(given) else _imported(given)

    def changed(row: Any) -> Any:
        made = function(dict(row) if isinstance(row, Mapping) else row)
        both = isinstance(row, Mapping) and isinstance(made, Mapping)
        return {**row, **made} if both else made

    return changed


def _imported(given: str) -> Function:
    """Import a function from "path/to/file.py:function"."""
    file, colon, name = str(given).rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise DataError(
            f"preprocessing_func={given!r} is not a function: pass one, or 'path/to/file.py:name'"
        )
    spec = importlib.util.spec_from_file_location(f"steelyard_preprocessing_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise DataError(f"preprocessing_func={given!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name)
    except Exception as error:  # the file is the user's own code
        raise DataError(
            f"preprocessing_func={given!r} cannot be imported: {reason_of(error)}"
        ) from error
    return found  # type: ignore[no-any-return]
