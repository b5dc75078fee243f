"""Does a written checkpoint hold what its own config promises?

A server loads a checkpoint that lacks a scale without an error and generates noise, so "it loads"
proves nothing. Here the files are opened again, starting from config.json alone, and checked
against the scheme, the digests that the run wrote, the source, and the errors that were reported
while quantizing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from steelyard.checkpoint.against_source import (
    RowsFound,
    carried,
    comparable,
    decoded_rows,
    same_config,
    same_files,
)
from steelyard.checkpoint.config_file import read_config
from steelyard.checkpoint.digests import Watch, check_digests, unwatched
from steelyard.checkpoint.findings import Findings
from steelyard.checkpoint.model_files import is_model_file
from steelyard.checkpoint.provenance import PROVENANCE, Provenance, read_provenance, source_of
from steelyard.checkpoint.scale_values import (
    ReportedScales,
    reported_scales,
    state_values,
    weight_values,
)
from steelyard.checkpoint.shards import Shards
from steelyard.checkpoint.structure import Structure
from steelyard.checkpoint.untrusted_files import read_json
from steelyard.checkpoint.view import CheckpointView
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import CheckpointError
from steelyard.words import count

__all__ = ["check_checkpoint", "validate_checkpoint"]

_ENOUGH = 1 << 26  # weights that are decoded whole, beyond the first and the last module


def validate_checkpoint(
    folder: str | Path,
    *,
    source: Shards | None = None,
    reported: Mapping[str, float] | None = None,
    samples: int = 8,
    fused: Iterable[tuple[str, ...]] = (),
    allow_negative: bool | None = None,
    same_bytes: bool = True,
    changed: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[str]:
    """Return the problems of a checkpoint, one line each; an empty list means that it is good.

    Digests are not compared: see `check_checkpoint`, which takes the same arguments.
    """
    return check_checkpoint(
        folder,
        source=source,
        reported=reported,
        samples=samples,
        fused=fused,
        allow_negative=allow_negative,
        same_bytes=same_bytes,
        changed=changed,
        dtypes=dtypes,
        digests=False,
    ).problems


def check_checkpoint(
    folder: str | Path,
    *,
    source: Shards | None = None,
    reported: Mapping[str, float] | None = None,
    scales: Mapping[str, ReportedScales] | None = None,
    samples: int = 8,
    fused: Iterable[tuple[str, ...]] = (),
    allow_negative: bool | None = None,
    nearest: bool = False,
    same_bytes: bool = True,
    changed: Collection[str] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    digests: bool = True,
    full: bool = False,
    watch: Watch = unwatched,
) -> Findings:
    """Check a checkpoint; see `Findings`.

    source:         the original: rows of every weight are decoded and compared, and all other
                    tensors must be there
    reported:       module -> relative squared error of its weight, compared with the files
    scales:         module -> smallest and largest scale, as reported by the run
    samples:        number of weights that are decoded whole where errors are reported, evenly
                    spread over the model; fewer if they are large
    fused:          modules that the server fuses, which must share global and per-tensor scales
    allow_negative: symmetric integer weights may have negative scales; None for those whose scheme
                    every kernel reads so
    nearest:        every weight was rounded to the nearest code
    same_bytes:     compare unquantized tensors byte for byte, not only by type and shape
    changed:        tensors that the run changed: they have the source's type and shape and are
                    finite; None uses those that provenance.json lists, if digests are compared
    dtypes:         module -> original type of its weight, where there is no source
    digests:        compare the files with provenance.json
    full:           decode all rows of all weights
    watch:          shows progress
    """
    folder = Path(folder)
    found = Findings()
    provenance = None
    if digests:
        provenance = _check_files(folder, found, watch)
    if changed is None:
        changed = set((provenance.changed or ()) if provenance is not None else ())
    try:
        written = WrittenCheckpoint(folder, source, dtypes)
    except CheckpointError as error:
        found.add("folder", [" ".join(str(error).split())])
        return found
    found.modules = len(written.schemes)
    structure = Structure(written)
    with written.shards:
        found.add("tensor", structure.tensors())
        found.add("scale", weight_values(written, structure.broken, allow_negative))
        found.add("cache", structure.cache())
        found.add("scale", state_values(structure))
        found.add("config", structure.config())
        found.add("report", reported_scales(written, scales or {}))
        requantized: list[str] | None = [] if digests and provenance is None else None
        for modules in fused:
            found.add("fused", structure.fusion(modules, requantized))
        if requantized:
            found.notes.append(
                f"vLLM quantizes {count(len(requantized), 'fused layer')} again with the largest "
                f"scale of its parts, such as {requantized[0]}; a run of Steelyard shares it"
            )
        if source is not None:
            found.rows = RowsFound()
            differing = decoded_rows(
                written,
                source,
                found.rows,
                without=structure.broken,
                changed=changed,
                reported=reported,
                nearest=nearest,
                whole=_whole(written, source, reported, samples),
                full=full,
                watch=watch,
            )
            found.add("weight", differing)
            found.add("unquantized", carried(written, source, same_bytes, changed))
            if changed:
                found.notes.append(
                    f"{count(len(changed), 'tensor')} that the run changed, such as "
                    f"{min(changed)}: compared with the source by type and shape alone"
                )
            _settings(written, source, provenance, found)
    return found


def _check_files(folder: Path, found: Findings, watch: Watch) -> Provenance | None:
    """Compare digests, if there are any; the model's JSON files must be readable."""
    for path in sorted(folder.glob("*.json")):
        if not is_model_file(Path(path.name)):
            continue
        try:
            read_json(path, unique=False)
        except CheckpointError as error:
            found.add("file", [str(error)])
        except ValueError as error:
            found.add("file", [f"{path.name} is not JSON: {error}"])
    try:
        provenance = read_provenance(folder)
    except CheckpointError as error:
        found.add("provenance", [str(error)])
        return None
    if provenance is None:
        found.notes.append(
            f"no {PROVENANCE}, so there are no digests: only a comparison with the source finds a "
            "change that keeps types and shapes"
        )
        return None
    found.digests = check_digests(folder, provenance, watch)
    found.add("digest", found.digests.problems)
    found.notes += [f"{name} was added after the run" for name in found.digests.added]
    return provenance


def _whole(
    written: WrittenCheckpoint,
    source: Shards,
    reported: Mapping[str, float] | None,
    samples: int,
) -> list[str]:
    """Return the modules to decode whole, to compare their error with the reported one."""
    known = [m for m in comparable(written, source) if m in (reported or {})]
    size = sum(math.prod(source.info(f"{m}.weight").shape) for m in known)
    wanted = min(samples, max(_ENOUGH * len(known) // max(size, 1), 2))
    if len(known) <= wanted:
        return known
    step = (len(known) - 1) / max(wanted - 1, 1)
    return [known[round(i * step)] for i in range(wanted)]


def _settings(
    written: WrittenCheckpoint, source: Shards, provenance: Provenance | None, found: Findings
) -> None:
    """Compare config.json and tokenizer with the source's.

    After a run that read this source they must be equal; another writer may save them differently.
    """
    folder = source.folder
    try:  # a view's are as they are after untying
        settings = source.config if isinstance(source, CheckpointView) else read_config(folder)
    except CheckpointError as error:
        found.notes.append(f"settings were not compared: {error}")
        return
    origin = provenance.source if provenance is not None else None
    complete = origin is not None and origin == source_of(folder)
    if origin is not None and not complete:
        found.notes.append(
            f"{folder} is not the folder that {PROVENANCE} describes; its files differ"
        )
    found.add("setting", same_config(written.config, settings, complete))
    found.add("tokenizer", same_files(written.shards.folder, folder, complete))
