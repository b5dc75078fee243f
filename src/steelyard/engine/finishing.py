"""The last phase of a run: algorithms may replace stored tensors of the complete checkpoint.

The first rank does all of it. The new tensors of an algorithm take effect with one mark: a run that
is killed before it repeats the algorithm from its start, and one that is killed after it does not.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from steelyard.algorithms import ModuleResult
from steelyard.algorithms.finished_checkpoint import FinishedCheckpoint
from steelyard.checkpoint.figures import figures_of
from steelyard.checkpoint.weight_errors import relative_error
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.data.samples import Samples
from steelyard.engine.progress import progress
from steelyard.formats.tensor_names import GLOBAL_SCALE, SCALE, WEIGHT, ZERO_POINT, base_of
from steelyard.kernels.scale_blocks import block_of
from steelyard.words import count

if TYPE_CHECKING:
    from steelyard.engine.run import Run

__all__ = ["finish_checkpoint", "share_results"]

Tensors = Mapping[str, torch.Tensor]


def finish_checkpoint(
    run: Run, samples: Samples | None, trust_remote_code: bool, folder: Path
) -> None:
    """Let algorithms replace tensors of the checkpoint in `folder`, and update the results."""
    algorithms = [each for each in run.solver.algorithms if each.finishes]
    if not algorithms:
        return
    writer, source, result = run.output.writer, run.source, run.result
    assert writer is not None and source.shards is not None and samples is not None
    for index, algorithm in enumerate(algorithms):
        if index < run.finished:  # by the run that this one resumes
            continue
        name = type(algorithm.modifier).__name__
        run.ranks.at(name)
        shown = functools.partial(progress, show=run.show)
        tensors = algorithm.finish(
            FinishedCheckpoint(
                source.shards.folder,
                folder,
                samples,
                run.pool,
                result.notes,
                shown,
                trust_remote_code,
            )
        )
        plain = [key for key in tensors if key in source.shards]
        if tensors:
            result.notes.append(
                f"{name} changed the scales of {count(len(tensors) - len(plain), 'module')} and "
                f"{count(len(plain), 'other tensor')}"
            )
        _measure(run, folder, tensors, writer.changed)
        run.finished = index + 1
        writer.claim(plain)
        writer.replace(tensors, run.marks.state())
    result.changed = sorted(writer.changed)


def share_results(run: Run) -> None:
    """Give the other ranks the results that the first one has updated."""
    if any(algorithm.finishes for algorithm in run.solver.algorithms):
        result = run.result
        found = (dict(result.modules), result.notes, result.changed)
        modules, result.notes, result.changed = run.ranks.broadcast(found)
        result.modules.update(modules)


def _measure(run: Run, folder: Path, tensors: Tensors, changed: Collection[str]) -> None:
    """Compute the errors and figures of modules with these tensors, which replace the files'.

    changed: weights whose source the files do not hold keep the error of their rounding
    """
    modules = run.result.modules
    names = {run.source.module_key(name): name for name in modules}
    rescaled = dict.fromkeys(
        name.rpartition(".")[0] for name in tensors if base_of(name.rpartition(".")[2]) == WEIGHT
    )
    written = WrittenCheckpoint(folder, run.source.shards)
    with written.shards:
        for key in rescaled:
            if key in names and f"{key}.{WEIGHT}" not in changed:
                modules[names[key]] = _measured(written, key, tensors, modules[names[key]])


def _measured(
    written: WrittenCheckpoint, module: str, tensors: Tensors, found: ModuleResult
) -> ModuleResult:
    """Return the result of a module with the error and the figures of its new tensors."""
    assert written.source is not None
    stored = written.stored(module)
    part = stored.part(0, stored.shape[0])
    part |= {leaf: tensors[f"{module}.{leaf}"] for leaf in part if f"{module}.{leaf}" in tensors}
    weight = written.source.read(f"{module}.{WEIGHT}").float()
    decoded = stored.decode(part)
    error = relative_error(float((decoded - weight).double().square().sum()), weight)
    if "figures" not in found.details:
        return replace(found, error=error)
    qparams = {SCALE: part[SCALE] if part[SCALE].dtype.itemsize > 1 else part[SCALE].float()}
    if GLOBAL_SCALE in part:
        qparams[GLOBAL_SCALE] = part[GLOBAL_SCALE]
    if not stored.args.symmetric:
        qparams[ZERO_POINT] = _zero_points(stored.grid(part), stored.args, weight.shape)
    figures = figures_of(weight, qparams, stored.args, decoded)
    figures = {**found.details["figures"], **figures}
    return replace(found, error=error, details={**found.details, "figures": figures})


def _zero_points(grid: Any, args: Any, shape: torch.Size) -> torch.Tensor:
    """Return one zero point per scale: the code of the value 0."""
    rows, columns = block_of(args, *shape)
    zeros: torch.Tensor = (-grid.offset / grid.step).expand(shape)
    return zeros[::rows, ::columns].round()
