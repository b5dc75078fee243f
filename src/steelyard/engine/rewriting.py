"""Lets algorithms compute tensors of the source anew, before any block is worked on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard.engine.output import Output
from steelyard.engine.progress import progress
from steelyard.model.rewrites import rewrite_source
from steelyard.model.served_hooks import attach_rotations, made_rotation, stored_matrices
from steelyard.plan.plan import Plan

if TYPE_CHECKING:
    from steelyard.engine.run import Run

__all__ = ["add_matrices", "claim_rewritten", "rewrite"]


def rewrite(run: Run) -> None:
    """Rewrite the source; from here on it reads as the changed model."""
    rewriting = [algorithm for algorithm in run.solver.algorithms if algorithm.rewrites]
    with progress("rotating", len(rewriting), run.show) as advance:
        for algorithm in rewriting:
            found = algorithm.rewrite(run.source, run.result.notes)
            run.changed.update(rewrite_source(run.source, found))
            for rotation in algorithm.modifier.served_rotations():
                attach_rotations(run.source.model, rotation, made_rotation)
            advance()


def claim_rewritten(run: Run) -> None:
    """Record in the output which tensors differ from the source's."""
    if run.output.writer is not None and run.source.shards is not None:
        run.output.writer.claim(run.changed)


def add_matrices(output: Output, plan: Plan) -> None:
    """Write the matrices of rotations that a server applies."""
    if output.writer is None or output.writer.finished:
        return
    key, dtype = output.source.module_key, output.source.dtype
    for name, tensor in stored_matrices(output.source.model, plan.served, key, dtype).items():
        if name not in output.writer:
            output.writer.add(name, tensor)
