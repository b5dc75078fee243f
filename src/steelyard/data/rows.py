"""Opens a dataset of any supported kind as rows, in order or by index."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from steelyard.data.data_files import JsonLines, Parquet, Row, TextFile, optional
from steelyard.data.tokens import RowReader
from steelyard.errors import DataError
from steelyard.foreign import reason_of

__all__ = ["IndexedRows", "Rows", "collated", "open_rows"]

FILES = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".raw": "text",
    "": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Rows(Protocol):
    """Rows in order."""

    name: str

    def __iter__(self) -> Iterator[Row]: ...


@runtime_checkable
class IndexedRows(Protocol):
    """Rows that can be selected by index before they are read."""

    name: str

    def __iter__(self) -> Iterator[Row]: ...
    def __len__(self) -> int: ...
    def fetch(self, indices: Sequence[int]) -> Iterator[Row]: ...


class SequenceRows:
    """The items of any object with a length and an index."""

    def __init__(self, items: Any, name: str) -> None:
        self.name = name
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Row]:
        return self.fetch(range(len(self)))

    def fetch(self, indices: Sequence[int]) -> Iterator[Row]:
        for index in indices:
            yield f"{self.name}, sample {index}", self._items[index]


class FrameRows:
    """The rows of a pandas DataFrame, or the values of a Series, by position."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, index: int) -> Any:
        row = self._frame.iloc[index]
        return dict(row.items()) if self._frame.ndim == 2 else row


class IterableRows:
    """The items of any other iterable, in order."""

    def __init__(self, rows: Iterable[Any], name: str) -> None:
        self.name = name
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        kind = "batch" if isinstance(self._rows, DataLoader) else "sample"
        default = getattr(self._rows, "collate_fn", None) is default_collate
        for index, row in enumerate(self._rows):
            where = f"{self.name}, {kind} {index}"
            if default and _is_transposed(row):
                raise DataError(
                    f"{where}: the loader's default collate_fn transposes lists; pass it "
                    "collate_fn=list, or tensors"
                )
            yield where, row


def open_rows(dataset: Any, split: str | None, shuffle: bool, reader: RowReader) -> Rows:
    """Return the rows of a dataset; `load_samples` lists the supported kinds."""
    if isinstance(dataset, (str, Path)):
        return _named(dataset, split, shuffle, reader)
    if isinstance(dataset, Mapping) and _is_from_datasets(dataset):
        return _collection(_pick(dataset, split), "the dataset")
    if split is not None:
        raise DataError(
            f"splits={split!r} needs the name of a dataset or a DatasetDict; a "
            f"{type(dataset).__name__} has no splits"
        )
    return _collection(dataset, f"the {type(dataset).__name__}")


def _collection(dataset: Any, name: str) -> Rows:
    if isinstance(dataset, Mapping):
        return SequenceRows(_by_row(dataset), name)
    if isinstance(dataset, (torch.Tensor, np.ndarray)) and dataset.ndim != 2:
        raise DataError(
            f"token ids must be (samples, seq), got a tensor of shape {tuple(dataset.shape)}"
        )
    if isinstance(dataset, (list, tuple)) and dataset and isinstance(dataset[0], int):
        raise DataError("a list of numbers is one sample: put it into a list of samples")
    kind = type(dataset)
    if hasattr(kind, "iloc"):  # pandas' own brackets take a label
        dataset = FrameRows(dataset)
        kind = FrameRows
    by_index = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if by_index and not isinstance(dataset, IterableDataset):
        return SequenceRows(dataset, name)
    if isinstance(dataset, Iterable):
        return IterableRows(dataset, name)
    raise DataError(
        f"a {kind.__name__} is not calibration data: pass a file (.txt, .jsonl, .parquet), a "
        "dataset or its name, a list of texts, token ids or a DataLoader"
    )


def collated(rows: Iterator[Row], collator: Callable[[list[Any]], Any], size: int) -> Iterator[Row]:
    """Yield the collator's output for `size` rows at a time."""
    while some := list(itertools.islice(rows, size)):
        where = some[0][0]
        try:
            yield where, collator([row for _, row in some])
        except Exception as error:
            raise DataError(f"{where}: data_collator fails ({reason_of(error)})") from error


# -- files and names --------------------------------------------------------------------------


def _named(dataset: str | Path, split: str | None, shuffle: bool, reader: RowReader) -> Rows:
    path = Path(dataset)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):  # too long, or with a NUL: a text, not a name
        is_file = is_folder = False
    known = path.suffix.lower() in FILES and path.suffix != ""
    if not is_file:
        name = str(dataset)
        if is_folder or (isinstance(dataset, str) and HUB_NAME.fullmatch(name) and not known):
            return _from_datasets(name, split, shuffle)
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        raise DataError(
            f"there is no file {shown!r}: pass a file, the name of a dataset, or a list of texts"
        )
    if split is not None:
        raise DataError(f"splits={split!r} needs the name of a dataset; {path} is a file")
    form = FILES.get(path.suffix.lower())
    if form == "text":
        return TextFile(path, reader)
    if form == "json":
        return JsonLines(path)
    if form == "parquet":
        return Parquet(path, reader.columns)
    raise DataError(
        f"{path}: cannot read files of type {path.suffix}, only "
        f"{', '.join(suffix for suffix in FILES if suffix)}"
    )


def _from_datasets(name: str, split: str | None, shuffle: bool) -> Rows:
    """Load a dataset by name; stream it if only the first rows are needed."""
    datasets = optional("datasets", f"the dataset {name!r}")
    try:
        if split is None:
            split = _only(datasets.get_dataset_split_names(name), name)
        streaming = not shuffle and "[" not in split  # slices need the whole
        loaded = datasets.load_dataset(name, split=split, streaming=streaming)
    except DataError:
        raise
    except Exception as error:  # many kinds: no such name, no network, a missing config
        raise DataError(
            f"the dataset {name!r} cannot be loaded: {reason_of(error)}; if it needs more "
            "than a name and a split, load it yourself and pass the object"
        ) from error
    return _collection(loaded, f"{name} ({split})")


def _pick(splits: Mapping[str, Any], split: str | None) -> Any:
    if split is None:
        split = _only(list(splits), "the dataset")
    if split not in splits:
        raise DataError(f"there is no split {split!r}, only: {', '.join(splits)}")
    return splits[split]


def _only(splits: Sequence[str], name: str) -> str:
    if len(splits) == 1:
        return splits[0]
    raise DataError(f"{name} has the splits {', '.join(splits) or 'none'}: choose one, splits=")


def _is_from_datasets(dataset: object) -> bool:
    return type(dataset).__module__.split(".")[0] == "datasets"


# -- shapes of collections --------------------------------------------------------------------


def _by_row(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn columns, such as a tokenizer's output for a batch, into rows.

    >>> _by_row({"input_ids": torch.tensor([[1, 2], [3, 4]])})
    [{'input_ids': tensor([1, 2])}, {'input_ids': tensor([3, 4])}]
    """
    first = next(iter(columns.values()), None)
    is_one = isinstance(first, str) or (
        "input_ids" in columns
        and len(columns["input_ids"]) > 0
        and np.ndim(columns["input_ids"][0]) == 0
    )
    if is_one:
        return [dict(columns)]
    try:
        lengths = {str(name): len(column) for name, column in columns.items()}
    except TypeError:
        raise DataError("a mapping must hold columns of equal length") from None
    if len(set(lengths.values())) != 1:
        raise DataError(f"a mapping must hold columns of equal length, got {lengths}")
    size = next(iter(lengths.values()))
    return [{name: column[i] for name, column in columns.items()} for i in range(size)]


def _is_transposed(batch: Any) -> bool:
    """Whether default_collate has transposed lists: one tensor (batch) per position."""
    if isinstance(batch, Mapping):
        return "messages" in batch or _is_transposed(batch.get("input_ids"))
    return isinstance(batch, (list, tuple)) and any(
        isinstance(item, torch.Tensor) and item.ndim == 1 for item in batch
    )
