"""Checks whether a checkpoint was made from this source.

Quantized weights are decoded, a sample of rows or all, and must lie within a few steps of the
source's. Every other tensor must have the source's bytes, unless the run claims to have changed it:
then it must keep its type and shape, and be finite. Settings and tokenizer must be the source's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.deviation import Deviation
from steelyard.checkpoint.digests import Watch, unwatched
from steelyard.checkpoint.finite import check_finite
from steelyard.checkpoint.model_files import is_tokenizer_file
from steelyard.checkpoint.other_files import other_files
from steelyard.checkpoint.shards import Shards
from steelyard.checkpoint.stored_weight import StoredWeight
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import NonFiniteError
from steelyard.foreign import reason_of, show

__all__ = ["RowsFound", "carried", "comparable", "decoded_rows", "same_config", "same_files"]

TOLERANCE = 0.01  # of a reported error, relative
SAMPLE = 1 << 22  # weights to decode of a checkpoint, but at least a few rows of each matrix
_AT_ONCE = 1 << 22  # weights
_OWN = {"quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
_OWN |= {"use_cache"}  # does not change the model's outputs


@dataclass
class RowsFound:
    """How many rows of the quantized weights were decoded."""

    modules: int = 0
    rows: int = 0
    total: int = 0


def decoded_rows(
    written: WrittenCheckpoint,
    source: Shards,
    found: RowsFound,
    *,
    without: set[str],
    changed: Collection[str] = (),
    reported: Mapping[str, float] | None = None,
    nearest: bool = False,
    whole: Iterable[str] = (),
    full: bool = False,
    watch: Watch = unwatched,
) -> Iterator[str]:
    """Decode rows of every quantized weight; yield the weights that do not match the source.

    found:    receives the number of rows
    without:  modules that cannot be decoded
    changed:  tensors that the run changed: their weights are decoded and must be finite
    reported: module -> relative squared error, compared where all rows are decoded
    nearest:  every weight was rounded to the nearest code
    whole:    modules whose rows are all decoded, not a sample
    full:     decode all rows of all modules
    """
    modules = [m for m in comparable(written, source) if m not in without]
    budget = SAMPLE // max(len(modules), 1)
    for module in sorted((reported or {}).keys() - written.schemes.keys()):
        yield f"{module}.weight has a reported error, but is not quantized here"
    found.modules = len(modules)
    total = sum(written.shape(module)[0] for module in modules)
    with watch("decoding weights", len(modules), unit="steps") as advance:
        for module in modules:
            stored = written.stored(module)
            spans = _spans(stored, None if full or module in whole else budget)
            found.rows += sum(stop - start for start, stop in spans)
            if f"{module}.weight" in changed:
                problem = _not_finite(stored, spans)
            else:
                error = (reported or {}).get(module)
                problem = _compare(stored, source, module, spans, error, nearest)
            if problem is not None:
                yield f"{module}.weight {problem}"
            advance(1)
    found.total = total


def comparable(written: WrittenCheckpoint, source: Shards) -> list[str]:
    """Return the modules whose weight is quantized and has its original in the source."""
    return [
        module
        for module, scheme in written.schemes.items()
        if scheme.weights is not None and f"{module}.weight" in source
    ]


def _spans(stored: StoredWeight, budget: int | None) -> list[tuple[int, int]]:
    """Return the rows to decode, in runs spread over the weight, first and last rows included.

    budget: number of weights; None for all
    """
    rows, columns = stored.shape
    if budget is None or rows * columns <= budget:
        step = max(stored.unit, _AT_ONCE // max(columns, 1) // stored.unit * stored.unit)
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]
    runs = -(-rows // stored.unit)
    wanted = min(runs, max(2, budget // max(stored.unit * columns, 1)))
    chosen = sorted({round(i * (runs - 1) / max(wanted - 1, 1)) for i in range(wanted)})
    spans: list[tuple[int, int]] = []
    for run in chosen:
        start, stop = run * stored.unit, min((run + 1) * stored.unit, rows)
        if spans and spans[-1][1] == start:  # one read instead of two
            start = spans.pop()[0]
        spans.append((start, stop))
    return spans


def _compare(
    stored: StoredWeight,
    source: Shards,
    module: str,
    spans: list[tuple[int, int]],
    reported: float | None,
    nearest: bool,
) -> str | None:
    deviation = Deviation()
    whole = sum(stop - start for start, stop in spans) == stored.shape[0]
    held = reported is not None and whole  # stricter than the limits in steps
    for start, stop in spans:
        original = source.read_rows(f"{module}.weight", start, stop).float()
        try:
            part = stored.part(start, stop)
            grid = None if held else stored.grid(part)
            deviation.add(original, stored.decode(part), grid, stored.args, error_only=held)
        except (RuntimeError, ValueError, AssertionError, KeyError) as failure:
            return f"cannot be decoded: {reason_of(failure)}"
    if not held:
        return deviation.problem(nearest, reported)
    assert reported is not None
    error = deviation.relative_error
    if error <= reported * (1 + TOLERANCE) + stored.precision:
        return None
    return f"decodes with a relative error of {error:.4g}; reported {reported:.4g}"  # NaN, too


def _not_finite(stored: StoredWeight, spans: list[tuple[int, int]]) -> str | None:
    for start, stop in spans:
        try:
            rows = stored.decode(stored.part(start, stop))
        except (RuntimeError, ValueError, AssertionError, KeyError) as failure:
            return f"cannot be decoded: {reason_of(failure)}"
        if not bool(torch.isfinite(rows).all()):
            return "decodes to values that are not finite"
    return None


def carried(
    written: WrittenCheckpoint,
    source: Shards,
    same_bytes: bool = True,
    changed: Collection[str] = (),
) -> Iterator[str]:
    """Yield the tensors that were not quantized and differ from the source.

    same_bytes: False compares only type and shape
    changed:    tensors that the run changed, whose values may differ but must be finite
    """
    for name in sorted(changed):
        if name not in written.shards and name.rpartition(".")[0] not in written.schemes:
            yield f"{name} is listed as changed, but there is no such tensor"
    for name in source:
        module, _, local = name.rpartition(".")
        if module in written.schemes and local == "weight":
            continue
        if name not in written.shards:
            if not _was_split(written, name, source):
                yield f"{name} is in the source, but missing here"
            continue
        there, here = source.info(name), written.shards.info(name)
        cast = here.dtype == written.cast and there.dtype.is_floating_point
        if not (cast or there.dtype == here.dtype) or there.shape != here.shape:
            yield f"{name} is {here.dtype} {here.shape}; the source has {there.dtype} {there.shape}"
        elif name in changed:
            try:
                check_finite(name, written.shards.read(name))
            except NonFiniteError as error:
                yield str(error)
        elif same_bytes and not _equal(written, name, source, cast):
            yield f"{name} is not quantized, but its values differ from the source"


def _equal(written: WrittenCheckpoint, name: str, source: Shards, cast: bool) -> bool:
    """Whether a tensor has the source's values, in the type that it was cast to."""
    if not cast or source.info(name).dtype == written.cast:
        return written.shards.equal(name, source)
    return torch.equal(written.shards.read(name), source.read(name).to(written.cast))


def _was_split(written: WrittenCheckpoint, name: str, source: Shards) -> bool:
    """Whether this tensor of the source stacks experts that are quantized one by one here."""
    below = name.rpartition(".")[0] + "."
    return len(source.info(name).shape) == 3 and any(m.startswith(below) for m in written.schemes)


def same_config(
    written: Mapping[str, Any], source: Mapping[str, Any], complete: bool, path: str = ""
) -> Iterator[str]:
    """Yield the settings of config.json that differ from the source's.

    complete: also settings that only one of the two has, which may be another writer's defaults
    """
    for key in {**source, **written}:
        if key in _OWN:
            continue
        name = f"{path}{key}"
        if key not in written or key not in source:
            if complete:
                where = "missing here" if key in source else "not in the source's"
                value = source[key] if key in source else written[key]
                yield f"config.json: {name} ({show(value)}) is {where}"
            continue
        here, there = written[key], source[key]
        if isinstance(here, dict) and isinstance(there, dict):
            yield from same_config(here, there, complete, f"{name}.")
        elif here != there:
            yield f"config.json: {name} is {show(here)}; the source has {show(there)}"


def same_files(folder: Path, source: Path, complete: bool) -> Iterator[str]:
    """Yield the tokenizer's files that differ from the source's.

    complete: a run copied them byte by byte; else another writer may have saved them again, and
              only a truncated file is a problem
    """
    for relative in other_files(source):
        if not is_tokenizer_file(relative):
            continue
        here, there = folder / relative, source / relative
        if not here.is_file():
            if complete:
                yield f"{relative} is in the source, but missing here"
            continue
        content, original = here.read_bytes(), there.read_bytes()
        if content == original:
            continue
        if len(content) < len(original) and original.startswith(content):
            yield f"{relative} ends after {len(content):,} of {len(original):,} bytes"
        elif complete:
            yield f"{relative} differs from the source's"
