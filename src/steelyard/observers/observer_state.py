"""The state of an observer: saved to a file, loaded, compared with another's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.atomic_file import FileKind, safetensors_metadata
from steelyard.errors import StatisticsError
from steelyard.observers.combine import State, combine
from steelyard.observers.statistics_checks import check_statistics

if TYPE_CHECKING:
    from steelyard.observers.base import Observer

__all__ = ["check_state", "differing", "load", "options_of", "restore", "save", "state_of"]


def state_of(observer: Observer, copy: bool = True) -> State:
    """Return identity, counts and statistics.

    copy: clone the tensors to the CPU
    """
    tensors = observer.get_statistics()
    if copy:
        tensors = {name: value.detach().cpu().clone() for name, value in tensors.items()}
    return identity_of(observer), tensors


def restore(observer: Observer, state: State, origin: str) -> None:
    """Replace the statistics by those of an observer with the same class, format and options.

    origin: where they come from, for the message
    """
    check_state(observer, state, origin)
    observer.reset()
    combine(observer, [state])


def check_state(observer: Observer, state: State, origin: str, there: str = "in the file") -> None:
    """Reject the state of another kind of observer, and damaged statistics.

    origin, there: where the state comes from, for the message
    """
    found, tensors = state
    differences = differing(found, identity_of(observer), there, "here")
    if unknown := set(tensors) - set(observer.statistic_names()):
        extra = f"it holds {', '.join(sorted(unknown))}, which {observer.label} does not"
        differences = "; ".join(filter(None, (differences, extra)))
    if differences:
        raise StatisticsError(f"{origin} does not fit {observer.label}: {differences}")
    check_statistics(observer, found, tensors, origin)


def identity_of(observer: Observer) -> dict[str, Any]:
    """Return the observer's class, format and options, and how much it has observed."""
    args = observer.args
    kind, strategy = (getattr(v, "value", v) for v in (args.type, args.strategy))
    dtype = observer.observed_dtype
    return {
        "observer": type(observer).__name__,
        "base_name": observer.base_name,
        "format": f"{kind}{args.num_bits} {'' if args.symmetric else 'a'}symmetric "
        f"{strategy} {args.group_size} {args.block_structure} {args.scale_dtype}",
        "options": options_of(observer),
        "updates": observer.num_updates,
        "tokens": observer.num_observed_tokens,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }


def differing(first: dict[str, Any], second: dict[str, Any], here: str, there: str) -> str:
    """Return the differences that keep two states from being combined, or an empty string."""
    return "; ".join(
        f"{key} is {first.get(key)!r} {here} and {second.get(key)!r} {there}"
        for key in ("observer", "base_name", "format", "options")
        if first.get(key) != second.get(key)
    )


def options_of(observer: Observer) -> dict[str, Any]:
    """Return the options, declared or not, as JSON values."""
    if observer.options is not None:
        return dict(observer.options.model_dump(mode="json"))
    return {k: repr(v) for k, v in sorted(observer.args.observer_kwargs.items())}


# -- one observer's file ------------------------------------------------------------------------


def save(observer: Observer, path: str | Path) -> None:
    """Write the statistics to a safetensors file, atomically."""
    from safetensors.torch import save as tensors_to_bytes

    identity, tensors = state_of(observer)
    if not tensors:
        raise StatisticsError(f"{observer.label} has no statistics to save")
    _FILE.write(path, tensors_to_bytes(tensors, metadata={"steelyard": json.dumps(identity)}))


def load(observer: Observer, path: str | Path) -> None:
    """Replace the statistics by those in a file that `save` wrote for the same kind of observer."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = _parse((file.metadata() or {}).get("steelyard"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise StatisticsError(f"{path} is not a readable safetensors file: {error}") from None
    if metadata is None:
        raise StatisticsError(f"{path} holds no observer statistics written by steelyard")
    restore(observer, (metadata, tensors), str(path))


def _is_own(path: Path) -> bool:
    identity = _parse((safetensors_metadata(path) or {}).get("steelyard"))
    return identity is not None and "updates" in identity  # the file of a run has none


_FILE = FileKind("statistics", _is_own, StatisticsError)


def _parse(text: str | None) -> dict[str, Any] | None:
    """Return the metadata that `save` wrote, or None for another program's."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
