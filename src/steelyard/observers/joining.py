"""Statistics travel: between observers, between ranks, and through a file.

All three are one operation. Each party *contributes* its statistics, and the contributions are
reduced with the operation declared beside the statistic (`Observer._act_sync_dict`): one of
torch.distributed's, or `IN_ORDER`, which puts one party's values after the other's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from steelyard.distributed.packing import gather_plainly
from steelyard.errors import StatisticsError
from steelyard.observers.linked import disagreement
from steelyard.observers.statistics_checks import check_statistics
from steelyard.whole_file import FileKind, safetensors_metadata

if TYPE_CHECKING:
    from steelyard.observers.base import Observer

__all__ = ["IN_ORDER", "State", "join", "load", "merge", "restore", "save", "state_of", "sync"]

IN_ORDER = "in order"
"""(num_observations, ...) of all parties one after the other; the observer makes of them what it
holds (`Observer.joined`)."""

State = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""What an observer is and has seen, and its statistics: what a file holds, and what ranks send."""

_REDUCE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.SUM: torch.add,
    # contributions to an average come weighed already
    dist.ReduceOp.AVG: torch.add,
    IN_ORDER: lambda mine, theirs: torch.cat([mine, theirs]),
}


def merge(first: Observer, second: Observer) -> None:
    """Make `first` as if it had gone on to observe what `second` observed."""
    _require_statistics(first)
    if not first._act_sync_dict:
        raise StatisticsError(
            f"{first.label} keeps only its last observation, so there is nothing to merge: "
            "use an observer that accumulates, such as static_minmax"
        )
    _check_alike(first, second)
    counts = [first.num_updates, second.num_updates]
    mine, theirs = first.contribution(counts, 0), second.contribution(counts, 1)
    in_order = {}
    for name, op in first._act_sync_dict.items():
        total = theirs.get(name, mine.get(name))
        if name in mine and name in theirs:
            skip = 1 if op == IN_ORDER else 0
            _check_shape(first, name, mine[name].shape[skip:], theirs[name].shape[skip:])
            total = _REDUCE[op](mine[name], theirs[name].to(mine[name].device))
        if total is None:
            continue
        if op == IN_ORDER:
            in_order[name] = total
        elif name in mine:
            _replace(first, name, total)
        else:
            setattr(first, name, total.clone())
    if in_order:
        first.joined(in_order)
    first.num_updates = sum(counts)
    first.num_observed_tokens += second.num_observed_tokens
    first.observed_dtype = first.observed_dtype or second.observed_dtype


def sync(observer: Observer) -> list[dist.Work]:
    """Reduce the statistics over all ranks, in rank order; returns handles to wait for.

    Every rank must call this, once, for the same observers in the same order. A rank that has
    observed nothing takes part and leaves with the others' statistics.
    """
    if not (observer._act_sync_dict and dist.is_available() and dist.is_initialized()):
        return []
    headers = gather_plainly(_header(observer))
    for rank, header in enumerate(headers):
        differing = _differing(headers[0], header, "on rank 0", f"on rank {rank}")
        if differing:
            raise StatisticsError(
                f"{observer.label}: all ranks must hold the same observer, but {differing}"
            )
    counts = [header["updates"] for header in headers]
    own = observer.contribution(counts, dist.get_rank())
    works = []
    in_order: dict[str, torch.Tensor] = {}
    for name, op in observer._act_sync_dict.items():
        if op == IN_ORDER:
            values = [h["in_order"][name] for h in headers if name in h["in_order"]]
            for value in values[1:]:
                _check_shape(observer, name, values[0].shape[1:], value.shape[1:])
            if values:
                device = own[name].device if name in own else values[0].device
                in_order[name] = torch.cat(values).to(device)
            continue
        described = [header["tensors"][name] for header in headers if name in header["tensors"]]
        if not described:
            continue
        shape, dtype = described[0]
        for other, other_dtype in described[1:]:
            _check_shape(observer, name, shape, other)
            dtype = torch.promote_types(dtype, other_dtype)
        if name in own:
            value = _replace(observer, name, own[name].to(dtype))
        else:
            value = _neutral(op, shape, dtype)
            setattr(observer, name, value)
        reduced_by = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op  # gloo has no AVG
        works.append(dist.all_reduce(value, op=reduced_by, async_op=True))
    if in_order:
        observer.joined(in_order)
    observer.num_updates = sum(counts)
    observer.num_observed_tokens = sum(header["tokens"] for header in headers)
    dtypes = [header["dtype"] for header in headers if header["dtype"] is not None]
    observer.observed_dtype = observer.observed_dtype or (dtypes[0] if dtypes else None)
    return [work for work in works if work is not None]


def state_of(observer: Observer) -> State:
    """Return the observer's statistics, in memory of their own on the CPU."""
    tensors = {k: v.detach().cpu().clone() for k, v in observer.get_statistics().items()}
    return _identity(observer), tensors


def join(observer: Observer, states: Iterable[State]) -> None:
    """Let an observer hold what others like it have seen, one after the other, instead of its own.

    One without memory holds what was seen last.
    """
    if not observer._act_sync_dict:
        seen = [state for state in states if state[1]]
        if len(seen) > 1:
            _require_statistics(observer)
        if seen:
            restore(observer, seen[-1], "what was seen last")
            observer.num_updates = sum(int(about["updates"]) for about, _ in seen)
            observer.num_observed_tokens = sum(int(about["tokens"]) for about, _ in seen)
        return
    total = _like(observer)
    for state in states:
        part = _like(observer)
        restore(part, state, "another's statistics")
        total.merge(part)
    restore(observer, state_of(total), "the sum of them")


def _require_statistics(observer: Observer) -> None:
    if observer.calculates:
        raise StatisticsError(
            f"{observer.label} defines only calculate_qparams, so what it observed in parts, by "
            "several ranks or in several files, cannot be joined; define "
            "update_statistics_from_observed, or calibrate in one process"
        )


def _like(observer: Observer) -> Observer:
    fresh: Observer = type(observer)(observer.base_name, observer.args)
    fresh.module_name = observer.module_name
    return fresh


def _is_own(path: Path) -> bool:
    identity = _parse((safetensors_metadata(path) or {}).get("steelyard"))
    return identity is not None and "updates" in identity  # not so the file of a whole run


_FILE = FileKind("statistics", _is_own, StatisticsError)


def save(observer: Observer, path: str | Path) -> None:
    """Write the statistics to a safetensors file; the file appears whole or not at all."""
    from safetensors.torch import save as tensors_to_bytes

    identity, tensors = state_of(observer)
    if not tensors:
        raise StatisticsError(f"{observer.label} has observed nothing that could be saved")
    _FILE.write(path, tensors_to_bytes(tensors, metadata={"steelyard": json.dumps(identity)}))


def load(observer: Observer, path: str | Path) -> None:
    """Replace the statistics by those in a file that `save` wrote for an observer like this."""
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


def restore(observer: Observer, state: State, origin: str) -> None:
    """Replace the statistics by those of an observer like this.

    origin: where they come from, for the message
    """
    found, tensors = state
    differing = _differing(found, _identity(observer), "in the file", "here")
    unknown = set(tensors) - set(observer.statistic_names())
    if unknown:
        extra = f"it holds {', '.join(sorted(unknown))}, which {observer.label} does not"
        differing = "; ".join(filter(None, (differing, extra)))
    if differing:
        raise StatisticsError(f"{origin} does not fit {observer.label}: {differing}")
    check_statistics(observer, found, tensors, origin)
    observer.reset()
    in_order = {n: v for n, v in tensors.items() if observer._act_sync_dict.get(n) == IN_ORDER}
    for name, value in tensors.items():
        if name not in in_order:
            setattr(observer, name, value)
    if in_order:
        observer.joined(in_order)
    observer.num_updates = int(found["updates"])
    observer.num_observed_tokens = int(found["tokens"])
    observer.observed_dtype = getattr(torch, found["dtype"]) if found["dtype"] else None


def _identity(observer: Observer) -> dict[str, Any]:
    args = observer.args
    kind, strategy = (getattr(v, "value", v) for v in (args.type, args.strategy))
    return {
        "observer": type(observer).__name__,
        "base_name": observer.base_name,
        "format": f"{kind}{args.num_bits} {'' if args.symmetric else 'a'}symmetric "
        f"{strategy} {args.group_size} {args.block_structure} {args.scale_dtype}",
        "options": _options(observer),
        "updates": observer.num_updates,
        "tokens": observer.num_observed_tokens,
        "dtype": str(observer.observed_dtype).removeprefix("torch.")
        if observer.observed_dtype is not None
        else None,
    }


def _differing(first: dict[str, Any], second: dict[str, Any], here: str, there: str) -> str:
    """Return in which way two identities cannot be one, or an empty string."""
    return "; ".join(
        f"{key} is {first.get(key)!r} {here} and {second.get(key)!r} {there}"
        for key in ("observer", "base_name", "format", "options")
        if first.get(key) != second.get(key)
    )


def _options(observer: Observer) -> dict[str, Any]:
    """Return the options, declared or not, in a form that a file can hold."""
    if observer.options is not None:
        return dict(observer.options.model_dump(mode="json"))
    return {k: repr(v) for k, v in sorted(observer.args.observer_kwargs.items())}


def _parse(text: str | None) -> dict[str, Any] | None:
    """Return what `save` wrote, or None for the metadata of another program."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _replace(observer: Observer, name: str, value: torch.Tensor) -> torch.Tensor:
    """Set a statistic, in place where it can be: a module may share the tensor."""
    current: torch.Tensor = getattr(observer, name)
    shared = current.dtype == value.dtype and not current.is_inference()
    if not (shared and current.is_contiguous()):
        current = torch.empty_like(value, memory_format=torch.contiguous_format)
        setattr(observer, name, current)
    return current.copy_(value)


def _header(observer: Observer) -> dict[str, Any]:
    ops = observer._act_sync_dict
    statistics = {k: v for k, v in observer.get_statistics().items() if k in ops}
    in_order = {k: v.detach().cpu() for k, v in statistics.items() if ops[k] == IN_ORDER}
    return {
        **_identity(observer),
        "dtype": observer.observed_dtype,
        "in_order": in_order,
        "tensors": {k: (tuple(v.shape), v.dtype) for k, v in statistics.items()},
    }


def _neutral(op: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what leaves the others' values unchanged, on the device that the backend reduces."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    start = {dist.ReduceOp.MIN: float("inf"), dist.ReduceOp.MAX: float("-inf")}.get(op, 0)
    return torch.full(shape, start, dtype=dtype, device=device)


def _check_alike(first: Observer, second: Observer) -> None:
    differing = disagreement(first.args, second.args)
    if type(first) is not type(second) or first.base_name != second.base_name:
        differing = f"{first.label} and {second.label}"
    elif _options(first) != _options(second):
        differing = f"options {_options(first)} and {_options(second)}"
    if differing:
        raise StatisticsError(f"only observers that are alike can be merged, not {differing}")


def _check_shape(observer: Observer, name: str, mine: Any, theirs: Any) -> None:
    if tuple(mine) != tuple(theirs):
        raise StatisticsError(
            f"{observer.label}: {name} has shape {tuple(mine)} on one side and "
            f"{tuple(theirs)} on the other: they observed different things"
        )
