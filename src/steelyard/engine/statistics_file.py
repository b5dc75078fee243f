"""The statistics of a whole run in one file, and files of several runs joined.

A file holds the statistics of every observer, with the name and arguments to rebuild it. Files join
as ranks do (`observers.combine`). The file also names the model, its weights, the recipe, and each
run with its data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from steelyard.atomic_file import FileKind, safetensors_metadata
from steelyard.engine.statistics_content import StatisticsContent
from steelyard.errors import StatisticsError
from steelyard.observers import Observer
from steelyard.observers.combine import State, combine
from steelyard.observers.observer_state import check_state, state_of

__all__ = ["STATISTICS", "Key", "Observed", "Statistics", "fingerprint"]

Key = tuple[str, str]
"""Module, and the value observed: weight (its importance) | input | output | q | k | v."""

_KIND = "statistics of a run"
_VERSION = 1
_COUNTS = ("updates", "tokens", "dtype")  # of a state; the rest identifies the observer


@dataclass(frozen=True)
class Observed:
    """One observer: its arguments and its statistics; no tensors if it observed nothing."""

    name: str
    args: dict[str, Any]
    state: State

    @classmethod
    def of(cls, observer: Observer) -> Observed:
        known = Observer.registered_names()
        names = [n for n in known if Observer.get_value_from_registry(n) is type(observer)]
        if not names:
            raise StatisticsError(
                f"the class of {observer.label} is not registered, so no file can name it: "
                "register it with @Observer.register"
            )
        return cls(names[0], observer.args.model_dump(mode="json"), state_of(observer))

    def build(self, key: Key) -> Observer:
        """Return an observer like the saved one, without statistics."""
        args = QuantizationArgs.model_validate(self.args)
        observer = Observer.load_from_registry(self.name, base_name=key[1], args=args)
        observer.module_name = key[0]
        return observer


@dataclass
class Statistics:
    """Statistics of all observers of a run.

    model:     its name, and the digest of its configuration
    runs:      of each, the digest of its data, samples, tokens, and versions
    weights:   module -> the shape, type and digest of its weight; see `fingerprint`
    """

    recipe: str
    model: dict[str, str]
    runs: list[dict[str, Any]]
    weights: dict[str, str] = field(default_factory=dict)
    observers: dict[Key, Observed] = field(default_factory=dict)

    # -- the file -----------------------------------------------------------------------------

    def write(self, path: str | Path) -> None:
        """Write the file atomically."""
        kinds: list[Any] = []
        places: dict[str, int] = {}
        observers, tensors = [], {}
        for (module, base), observed in self.observers.items():
            found, values = observed.state
            identity = {k: v for k, v in found.items() if k not in _COUNTS}
            kind = {"name": observed.name, "args": observed.args, "identity": identity}
            place = places.setdefault(json.dumps(kind, sort_keys=True), len(kinds))
            if place == len(kinds):
                kinds.append(kind)
            observers.append([module, base, place, *(found[name] for name in _COUNTS)])
            for name, value in values.items():
                tensors[f"{module}.{base}.{name}"] = value.contiguous()
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "model": self.model,
            "recipe": self.recipe,
            "samples": self.total("samples"),
            "tokens": self.total("tokens"),
            "runs": self.runs,
            "weights": self.weights,
            "kinds": kinds,
            "observers": observers,
        }
        # one metadata entry: safetensors does not keep the order of several
        STATISTICS.write(path, save(tensors, metadata={"steelyard": json.dumps(content)}))

    @classmethod
    def read(cls, path: str | Path) -> Statistics:
        path = Path(path)
        if not path.is_file():
            raise StatisticsError(f"there is no statistics file {path}")
        try:
            with safe_open(path, "pt") as file:
                text = (file.metadata() or {}).get("steelyard")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise StatisticsError(
                f"{path} is not a statistics file, or is truncated: {error}"
            ) from None
        content = _parsed(text)
        if content is None or content.get("kind") != _KIND:
            raise StatisticsError(
                f"{path} holds no statistics of a run; write them with `steelyard observe`, or "
                "with save_statistics of oneshot"
            )
        if content.get("version") != _VERSION:
            raise StatisticsError(
                f"{path} has version {content.get('version')} of the format, but this steelyard "
                f"reads version {_VERSION}; save the statistics again with it"
            )
        try:
            checked = StatisticsContent.model_validate_json(text or "")
            return cls._from(checked.model_dump(), tensors)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise StatisticsError(
                f"{path} is damaged ({where}: {first['msg']}); save the statistics again"
            ) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StatisticsError(
                f"{path} is damaged ({type(error).__name__}: {error}); save the statistics again"
            ) from error

    @classmethod
    def _from(cls, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Statistics:
        by_observer: dict[str, dict[str, torch.Tensor]] = {}
        for full, value in tensors.items():
            prefix, _, name = full.rpartition(".")
            by_observer.setdefault(prefix, {})[name] = value
        observers: dict[Key, Observed] = {}
        for module, base, place, *counts in content["observers"]:
            kind = content["kinds"][place]
            identity = {**kind["identity"], **dict(zip(_COUNTS, counts, strict=True))}
            state = (identity, by_observer.pop(f"{module}.{base}", {}))
            observers[module, base] = Observed(kind["name"], kind["args"], state)
        if by_observer:
            raise ValueError(f"tensors without an observer, such as {next(iter(by_observer))}")
        return cls(
            content["recipe"], content["model"], content["runs"], content["weights"], observers
        )

    def total(self, what: str) -> int:
        """Return the samples or tokens of all runs."""
        return sum(int(run[what]) for run in self.runs)

    def digest(self) -> str:
        """Return a digest of all statistics."""
        digest = hashlib.sha256(repr((self.recipe, self.model, self.runs, self.weights)).encode())
        for key, observed in sorted(self.observers.items()):
            identity, tensors = observed.state
            digest.update(repr((key, identity)).encode())
            for name, value in sorted(tensors.items()):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(_bytes(value))
        return digest.hexdigest()

    # -- joining ------------------------------------------------------------------------------

    @classmethod
    def joined(cls, files: Sequence[tuple[str, Statistics]]) -> Statistics:
        """Return the statistics of one run over all their data, in this order.

        files: name and content of each
        """
        name, first = files[0]
        for place, (other_name, other) in enumerate(files[1:], 1):
            _check_alike(name, first, other_name, other)
            for earlier_name, earlier in files[:place]:
                _check_other_data(earlier_name, earlier, other_name, other)
        return cls(
            first.recipe,
            first.model,
            [run for _, each in files for run in each.runs],
            first.weights,
            {
                key: _join(key, [(n, each.observers[key]) for n, each in files])
                for key in first.observers
            },
        )


def _join(key: Key, parts: Sequence[tuple[str, Observed]]) -> Observed:
    first = parts[0][1]
    total = first.build(key)
    for name, part in parts:
        check_state(total, part.state, name)
    combine(total, [part.state for _, part in parts])
    return Observed(first.name, first.args, state_of(total))


def _check_alike(name: str, one: Statistics, other_name: str, other: Statistics) -> None:
    both = f"{name} and {other_name} cannot be joined: "
    if one.model["config"] != other.model["config"]:
        raise StatisticsError(
            f"{both}they are of models with different configurations, {one.model['name']!r} and "
            f"{other.model['name']!r}"
        )
    for module in {**one.weights, **other.weights}:
        mine, theirs = one.weights.get(module), other.weights.get(module)
        if mine != theirs and None not in (mine, theirs):
            raise StatisticsError(
                f"{both}they are of different models; the weight of {module} is {mine} in one, "
                f"{theirs} in the other"
            )
    for module, base in {**one.observers, **other.observers}:
        holds = [(module, base) in each.observers for each in (one, other)]
        if not all(holds):
            raise StatisticsError(
                f"{both}{_what(base)} of {module} is only in {name if holds[0] else other_name}; "
                "use the same recipe for all runs"
            )


def _check_other_data(name: str, one: Statistics, other_name: str, other: Statistics) -> None:
    if {run["data"] for run in one.runs} & {run["data"] for run in other.runs}:
        what = "is given twice" if name == other_name else f"and {other_name} hold the same data"
        raise StatisticsError(f"{name} {what}, which would count twice; pass each run once")


def _what(base: str) -> str:
    return "the importance of the weight" if base == "weight" else f"the {base}"


def fingerprint(weight: torch.Tensor) -> str:
    """Return a fingerprint of a weight: shape, type, and a digest of its first row.

    The first row is enough: training changes every row.
    """
    digest = hashlib.sha256(_bytes(weight[:1])).hexdigest()[:16]
    return f"{tuple(weight.shape)} {str(weight.dtype).removeprefix('torch.')} {digest}"


def _bytes(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _is_own(path: Path) -> bool:
    content = _parsed((safetensors_metadata(path) or {}).get("steelyard"))
    return content is not None and content.get("kind") == _KIND


STATISTICS = FileKind("statistics", _is_own, StatisticsError)


def _parsed(text: str | None) -> dict[str, Any] | None:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
