"""Loads datasets by name, through the package `datasets`: from its cache, a folder, or the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.data.data_files import optional
from steelyard.data.known_datasets import DEMO, KnownDataset
from steelyard.errors import DataError
from steelyard.foreign import reason_of

__all__ = ["Loading", "load_named", "pick_split", "split_of"]


@dataclass(frozen=True)
class Loading:
    """Which part of a dataset to load, and how.

    config:    the configuration of a dataset on the hub
    path:      a file or folder to read instead
    arguments: further ones of `datasets.load_dataset`
    """

    split: str | None = None
    config: str | None = None
    path: str | Path | None = None
    streaming: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def needs_name(self) -> list[str]:
        """Return the options that were given and need a dataset on the hub."""
        given = {
            "dataset_config_name": self.config,
            "streaming": self.streaming or None,
            "raw_kwargs": self.arguments or None,
        }
        return [name for name, value in given.items() if value is not None]


def split_of(splits: Any) -> str | None:
    """Return the split that `splits` names: text, a list of one, or {"calibration": text}.

    >>> split_of({"calibration": "train[:5%]", "train": "train"})
    'train[:5%]'
    """
    if splits is None or isinstance(splits, str):
        return splits
    if isinstance(splits, Mapping):
        chosen = splits.get("calibration", next(iter(splits.values()), None))
        if isinstance(chosen, str) and ("calibration" in splits or len(splits) == 1):
            return chosen
        raise DataError(
            f"splits={splits!r} has no key 'calibration'; pass one split, such as 'train[:512]'"
        )
    if isinstance(splits, Sequence) and len(splits) == 1:
        return split_of(splits[0])
    raise DataError(
        f"splits={splits!r} must be one split, such as 'train[:512]'; join several as 'a+b'"
    )


def load_named(
    name: str, loading: Loading, shuffle: bool, known: KnownDataset | None
) -> tuple[Any, str]:
    """Return a dataset and its name with the split; stream it if only the first rows are needed.

    known: the hub name, split and configuration of a short name
    """
    datasets = optional("datasets", f"the dataset {name!r}")
    place = known.hub if known is not None and not Path(name).is_dir() else name
    config = loading.config or (known.config if known is not None and place != name else None)
    configs = [config] if config is not None else []
    split = loading.split if known is None else known.split_named(loading.split)
    try:
        if split is None:
            split = _only(datasets.get_dataset_split_names(place, *configs), name)
        whole = "[" in split  # a slice needs the whole
        streaming = loading.streaming or (known is not None and known.stream) or not shuffle
        loaded = datasets.load_dataset(
            place, *configs, split=split, streaming=streaming and not whole, **loading.arguments
        )
    except DataError:
        raise
    except Exception as error:  # many kinds: no such name, no network, a missing config
        raise DataError(
            f"the dataset {name!r} cannot be loaded: {reason_of(error)}; without a network pass a "
            f"file (.txt, .jsonl, .parquet), a dataset that you loaded yourself, or {DEMO!r} for "
            "the built-in text"
        ) from error
    return loaded, f"{name} ({split})"


def pick_split(splits: Mapping[str, Any], split: str | None) -> Any:
    """Return one split of several, or the slice of it that `split` names."""
    if split is None:
        split = _only(list(splits), "the dataset")
    name = split.partition("[")[0]
    if name not in splits:
        raise DataError(f"there is no split {name!r}, only: {', '.join(splits)}")
    return splits[name] if name == split else _sliced(splits[name], split)


def _sliced(rows: Any, split: str) -> Any:
    datasets = optional("datasets", f"splits={split!r}")
    name = split.partition("[")[0]
    try:
        asked = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(
            f"splits={split!r} cannot be read ({reason_of(error)}); write it as 'train[:512]'"
        ) from None
    return rows.select(i for part in asked for i in range(part.from_, part.to))


def _only(splits: Sequence[str], name: str) -> str:
    """Return the only split, or train, which llm-compressor takes too."""
    if len(splits) == 1 or "train" in splits:
        return splits[0] if len(splits) == 1 else "train"
    raise DataError(f"{name} has the splits {', '.join(splits) or 'none'}: choose one, splits=")
