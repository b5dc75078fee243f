"""Reads calibration data from text, JSON Lines and parquet files, and only the rows it needs."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from steelyard.data.media import COLUMNS
from steelyard.data.tokens import RowReader, columns_text
from steelyard.errors import DataError
from steelyard.foreign import reason_of

__all__ = ["JsonLines", "Parquet", "TextFile", "optional", "read_csv"]

BLOCK = 2**16  # characters of text tokenized at once
SCAN = 2**24  # bytes searched for line ends at once
LINE = 2**28  # longest line of JSON, in bytes

Row = tuple[str, Any]
"""The location of a row, for messages, and the row."""


def optional(module: str, purpose: str) -> Any:
    """Import an optional dependency."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.split(".")[0]
        raise DataError(f"{purpose} needs {package}: pip install steelyard[data]") from None


class TextFile:
    """Text, split into pieces of `reader.text_length` tokens across paragraphs.

    Each piece starts with the tokenizer's BOS token, if it adds one, as in training.
    """

    def __init__(self, path: Path, reader: RowReader) -> None:
        self.name = str(path)
        self._path = path
        self._reader = reader

    def __iter__(self) -> Iterator[Row]:
        prefix = self._prefix()
        length = self._reader.text_length - len(prefix)
        ids: list[int] = []
        count = 0
        for block in self._blocks():
            ids += self._reader.encode(block, special=False)
            while len(ids) >= length:
                yield f"{self.name}, piece {count}", prefix + ids[:length]
                del ids[:length]
                count += 1
        if ids:
            yield f"{self.name}, piece {count}", prefix + ids

    def _prefix(self) -> list[int]:
        start = self._reader.encode("")[:1]
        starts = bool(start) and start[0] == self._reader.tokenizer.bos_token_id
        return start if starts and self._reader.text_length > 1 else []

    def _blocks(self) -> Iterator[str]:
        """Yield the text in blocks that end at a paragraph, else at a line, else at a word."""
        rest, lines = "", 1
        with self._path.open(encoding="utf-8-sig") as file:
            while True:
                try:
                    read = file.read(BLOCK)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.name}: not UTF-8 text somewhere after line {lines} "
                        f"({error.reason}); save it as UTF-8"
                    ) from None
                lines += read.count("\n")
                rest += read
                end = _last_break(rest) if read else len(rest)
                if rest[:end].strip():
                    yield rest[:end]
                rest = rest[end:]
                if not read:
                    return


def _last_break(text: str) -> int:
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark)
        if found >= 0:
            return found + len(mark)
    return len(text)


class JsonLines:
    """One JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            number = 0
            while line := file.readline(LINE + 1):
                number += 1
                yield self._row(line, number)

    def fetch(self, indices: Sequence[int]) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(int(self._starts[index]))
                yield self._row(file.readline(LINE + 1), index + 1)

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The byte at which each line starts."""
        starts = [np.zeros(1, np.int64)]
        offset = 0
        with self._path.open("rb") as file:
            while block := file.read(SCAN):
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                starts.append(ends + offset + 1)
                offset += len(block)
        found = np.concatenate(starts)
        return found[found < offset]  # no line starts after a final line end

    def _row(self, line: bytes, number: int) -> Row:
        where = f"{self.name}:{number}"
        if not line.strip():
            return where, None
        if len(line) > LINE:
            raise DataError(f"{where}: the line has more than {LINE:,} bytes; cut its text")
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise DataError(f"{where}: not UTF-8 text") from None
        except (ValueError, RecursionError) as error:  # not JSON, or a number of 5,000 digits
            reason = getattr(error, "msg", None) or reason_of(error)
            raise DataError(f"{where}: not JSON ({reason}); write one object per line") from None
        if not isinstance(row, dict):
            raise DataError(
                f"{where}: expected an object with text or messages, got a {type(row).__name__}"
            )
        return where, row


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, whose first line names the columns."""
    csv.field_size_limit(LINE)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, restkey="", restval=""))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {reason_of(error)}") from None


class Parquet:
    """The rows of a parquet file; reads only the columns it needs."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.name = str(path)
        parquet = optional("pyarrow.parquet", str(path))
        try:
            present = parquet.ParquetFile(path).schema_arrow.names
            # A dictionary holds a repeated value once. Without it, a small file that repeats a text
            # of 500 MB in 1,000 rows would exhaust memory.
            leaves = self._leaves(parquet.ParquetFile(path), columns)
            self._file = parquet.ParquetFile(path, read_dictionary=leaves)
        except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is one
            raise DataError(f"{path} is not a parquet file: {reason_of(error)}") from None
        self._columns = [name for name in (*columns, "attention_mask", *COLUMNS) if name in present]
        if not any(name in present for name in columns):
            raise DataError(
                f"{path}: expected one of the columns {', '.join(columns)}, got: "
                f"{columns_text(present)}; name the one to read with text_column="
            )
        self._check_sizes()

    @staticmethod
    def _leaves(file: Any, columns: Sequence[str]) -> list[str]:
        """Return the paths of string fields within the columns."""
        stored = (file.schema.column(i) for i in range(len(file.schema)))
        return [
            c.path
            for c in stored
            if c.physical_type == "BYTE_ARRAY" and c.path.split(".")[0] in columns
        ]

    def _check_sizes(self) -> None:
        """Reject a row group that does not fit into memory; pyarrow would crash the process."""
        metadata, most = self._file.metadata, psutil.virtual_memory().available // 4
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = (group.column(i) for i in range(group.num_columns))
            size = sum(
                c.total_uncompressed_size
                for c in chunks
                if c.path_in_schema.split(".")[0] in self._columns
            )
            if size > most:
                raise DataError(
                    f"{self.name}: row group {number} has {size:,} bytes in the columns to read, "
                    f"but there is memory for {most:,}; write the file with smaller row groups, "
                    "or pass fewer rows"
                )

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __iter__(self) -> Iterator[Row]:
        index = 0
        batches = self._file.iter_batches(batch_size=64, columns=self._columns)
        while True:
            with self._readable():
                batch = next(batches, None)
            if batch is None:
                return
            for i in range(batch.num_rows):
                yield self._where(index), self._row(batch, i)
                index += 1

    def fetch(self, indices: Sequence[int]) -> Iterator[Row]:
        """Yield rows in the requested order; read each row group once."""
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        rows: dict[int, Any] = {}
        groups = np.searchsorted(ends, np.asarray(indices), side="right")
        for group in np.unique(groups):
            with self._readable():
                table = self._file.read_row_group(int(group), columns=self._columns)
            first = int(ends[group]) - sizes[group]
            for index in np.asarray(indices)[groups == group]:
                rows[int(index)] = self._row(table, int(index) - first)
        for index in indices:
            yield self._where(index), rows[index]

    def _row(self, table: Any, place: int) -> Any:
        with self._readable():  # invalid UTF-8 is detected here
            return table.slice(place, 1).to_pylist()[0]

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn pyarrow's error on a damaged page into one that names the file."""
        try:
            yield
        except (ValueError, OSError) as error:
            raise DataError(
                f"{self.name} cannot be read: {reason_of(error)}; download or write it again"
            ) from error

    def _where(self, index: int) -> str:
        return f"{self.name}, row {index}"
