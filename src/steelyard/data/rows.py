"""Opens a dataset of any supported kind as rows, in order or by index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from steelyard.data.data_files import JsonLines, Parquet, Row, TextFile, read_csv
from steelyard.data.file_names import FILES, data_file
from steelyard.data.hub_datasets import Loading, load_named, pick_split
from steelyard.data.known_datasets import DEMO, known_dataset
from steelyard.data.preprocessing import IndexedMappedRows, MappedRows
from steelyard.data.tokens import RowReader
from steelyard.demo.texts import built_in_texts
from steelyard.errors import DataError
from steelyard.foreign import reason_of

__all__ = ["IndexedRows", "Rows", "collated", "mapped", "open_rows"]

TYPES = ("custom", "json", "csv", "text", "parquet")  # what scripts call a dataset in files


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


def open_rows(dataset: Any, loading: Loading, shuffle: bool, reader: RowReader) -> Rows:
    """Return the rows of a dataset; `load_samples` lists the supported kinds."""
    if loading.path is not None:
        dataset = _at_path(dataset, loading)
    if isinstance(dataset, (str, Path)):
        return _named(dataset, loading, shuffle, reader)
    if idle := loading.needs_name():
        raise DataError(
            f"{idle[0]} needs the name of a dataset on the hub; a {type(dataset).__name__} is "
            "loaded already: remove the option"
        )
    if isinstance(dataset, Mapping) and _is_from_datasets(dataset):
        chosen = pick_split(dataset, loading.split)
        name = loading.split or str(getattr(chosen, "split", None) or "its only split")
        return _collection(chosen, f"the dataset ({name})")
    if loading.split is not None and not _is_from_datasets(dataset):
        raise DataError(
            f"splits={loading.split!r} needs the name of a dataset or a DatasetDict; a "
            f"{type(dataset).__name__} has no splits"
        )
    name = f"the {type(dataset).__name__}"
    if loading.split is not None:  # as in llm-compressor, whose scripts give it twice
        name += f" (loaded already, so splits={loading.split!r} is not applied)"
    return _collection(dataset, name)


def _at_path(dataset: Any, loading: Loading) -> str:
    """Return `dataset_path`, which replaces a dataset on the hub."""
    if dataset is not None and str(dataset) not in TYPES:
        raise DataError(
            f"dataset_path={str(loading.path)!r} replaces the dataset; remove one of them, or pass "
            'dataset="custom"'
        )
    if str(loading.path).startswith("dvc:"):
        raise DataError(f"dataset_path={str(loading.path)!r}: run `dvc get`, and pass the file")
    return str(loading.path)


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


def _named(dataset: str | Path, loading: Loading, shuffle: bool, reader: RowReader) -> Rows:
    path, split = data_file(dataset), loading.split
    if path is None:
        return _known(str(dataset), loading, shuffle, reader)
    if split is not None:
        raise DataError(f"splits={split!r} needs the name of a dataset; {path} is a file")
    form = FILES.get(path.suffix.lower())
    if form == "text":
        return TextFile(path, reader)
    if form == "json":
        return JsonLines(path)
    if form == "csv":
        return SequenceRows(read_csv(path), str(path))
    if form == "parquet":
        return Parquet(path, reader.columns)
    raise DataError(
        f"{path}: cannot read files of type {path.suffix}, only "
        f"{', '.join(suffix for suffix in FILES if suffix)}"
    )


def _known(name: str, loading: Loading, shuffle: bool, reader: RowReader) -> Rows:
    """Return the rows of a dataset by name; those of a known one become text or messages."""
    if name == DEMO:
        return SequenceRows(built_in_texts(8 * reader.text_length), "the built-in text")
    known = known_dataset(name)
    loaded, shown = load_named(name, loading, shuffle, known)
    rows = _collection(loaded, shown)
    if known is None or reader.prepares:
        return rows
    texts = mapped(rows, lambda row: known.row(row, reader.has_template))
    return mapped(texts, lambda row: reader.features(row, shown)) if reader.collates else texts


def mapped(rows: Rows, function: Callable[[Any], Any]) -> Rows:
    """Return rows that a function changes, by index if they are."""
    kind = IndexedMappedRows if isinstance(rows, IndexedRows) else MappedRows
    return kind(rows, function)


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
