"""Checks that a source's files hold the whole model, without an unmerged adapter.

A data-free run copies the tensors that it finds. Layers missing in the source would be missing in
the output, and a server may initialize them randomly without a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from steelyard.checkpoint import CheckpointView
from steelyard.model.file_modules import FilesModel
from steelyard.model.model_class import ModelClass
from steelyard.model.source import Source

__all__ = ["missing_parts", "random_parameters"]

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"^(.*?)\.(\d+)\.")


def missing_parts(source: Source) -> Iterator[str]:
    """Yield an error for layers that the files lack, and for an adapter that is not merged."""
    if source.shards is None:
        return
    yield from _adapters(source.shards)
    if isinstance(source.model, FilesModel):
        known = source.model.known
        yield from _known_layers(known) if known is not None else _stated_layers(source.shards)


def random_parameters(source: Source) -> Iterator[str]:
    """Yield a warning for parameters of the class that the files lack, other than whole layers."""
    known = source.model.known if isinstance(source.model, FilesModel) else None
    if known is None:
        return
    patterns = _patterns(known)
    missing = [name for name in known.missing() if not _is_elsewhere(name, patterns)]
    if missing:
        yield (
            f"the files do not hold {_some(missing)}, which {type(known.model).__name__} has: "
            "transformers initializes it randomly"
        )


def _adapters(view: CheckpointView) -> Iterator[str]:
    found = [name for name in _ADAPTER if (view.folder / name).exists()]
    if found:
        yield (
            f"{view.folder} holds an adapter ({', '.join(found)}), which would be missing in the "
            "output: merge it into the model first (peft's merge_and_unload), or move it away"
        )


def _known_layers(known: ModelClass) -> Iterator[str]:
    """Yield an error for parameters that every layer of the class has, but not every layer here."""
    patterns = _patterns(known)
    missing = [name for name in known.missing() if _is_elsewhere(name, patterns)]
    if missing:
        yield (
            f"the files do not hold {_some(missing)}, which other layers have and config.json asks "
            "for: download the checkpoint again, or correct the number of layers in config.json"
        )


def _patterns(known: ModelClass) -> set[str]:
    filled = {*known.places.values(), *known.converted.values()}
    return {_NUMBER.sub("*", name) for name in filled}


def _is_elsewhere(name: str, patterns: Iterable[str]) -> bool:
    pattern = _NUMBER.sub("*", name)
    return pattern != name and pattern in patterns


def _stated_layers(view: CheckpointView) -> Iterator[str]:
    """Yield an error if config.json states more layers than the files hold."""
    stated = view.text_config.get("num_hidden_layers")
    found: dict[str, set[int]] = {}
    for name in view.names():
        if match := _LAYER.match(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    if not isinstance(stated, int) or isinstance(stated, bool) or not found:
        return
    prefix, layers = max(found.items(), key=lambda item: len(item[1]))
    if len(layers) < stated:
        yield (
            f"config.json has num_hidden_layers {stated:,}, but the files hold {len(layers):,} "
            f"({prefix}.{min(layers)} to {max(layers)}): download the checkpoint again, or correct "
            "config.json"
        )


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
