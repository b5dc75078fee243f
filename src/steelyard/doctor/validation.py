"""Checks a checkpoint against all that is known of it: base model, report, recipe and digests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from steelyard.checkpoint import CheckpointView, Findings, check_checkpoint
from steelyard.checkpoint.digests import Watch, unwatched
from steelyard.checkpoint.scale_values import ReportedScales
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import CheckpointError, ReportError, SteelyardError
from steelyard.fusion import fused_groups
from steelyard.model.class_loading import loading_problems, tied_problems
from steelyard.model.file_modules import untie_as_written
from steelyard.recipes import load_recipe
from steelyard.report import read_report

__all__ = ["validate_folder"]


def validate_folder(
    folder: Path, base: Path | None = None, full: bool = False, watch: Watch = unwatched
) -> Findings:
    """Check a checkpoint; see `check_checkpoint`.

    base: folder of the original model
    full: decode all rows of all weights, not a sample
    """
    try:
        written = WrittenCheckpoint(folder, None)
    except CheckpointError:  # raised there too, after checking digests
        return check_checkpoint(folder, watch=watch)
    reported, scales, notes = _reported(written)
    negative, nearest = _recipe(written)
    view = None
    if base is not None:
        view = CheckpointView(base)
        for stack in [each for each in view.stacks if each.name in written.shards]:
            view.restack(stack)
        held = set(written.schemes)
        if not written.config.get("tie_word_embeddings", True):
            held |= {name.removesuffix(".weight") for name in written.shards}
        untie_as_written(view, held)
    found = check_checkpoint(
        folder,
        source=view,
        reported=reported,
        scales=scales,
        fused=list(fused_groups(written.schemes)),
        allow_negative=negative,
        nearest=nearest,
        full=full,
        watch=watch,
    )
    infos = [written.shards.info(name) for name in written.shards]
    specs = {info.name: (info.dtype, info.shape) for info in infos}
    found.add("tied", tied_problems(written.config, specs))
    found.notes += notes
    if not found.problems:
        found.notes += loading_problems(written.config, specs)
    return found


def _reported(
    written: WrittenCheckpoint,
) -> tuple[dict[str, float], dict[str, ReportedScales], list[str]]:
    """Return the errors and scales in report.json for modules of these files."""
    folder = Path(written.shards.folder)
    if not (folder / "report.json").is_file():
        return {}, {}, []
    try:
        modules = read_report(folder).modules
    except ReportError as error:
        return {}, {}, [str(error)]
    known = [module for module in modules if module.name in written.tensors]
    errors = {m.name: m.error for m in known if m.error is not None}
    scales = {
        m.name: ReportedScales(
            None if m.scale is None else (m.scale.min, m.scale.max),
            {local: (ends[0], ends[1]) for local, ends in m.activations.items() if len(ends) == 2},
        )
        for m in known
    }
    return errors, scales, []


def _recipe(written: WrittenCheckpoint) -> tuple[bool | None, bool]:
    """Whether the checkpoint's recipe allows negative scales, and rounds to nearest.

    None without a recipe of ours: then the scheme decides.
    """
    nearest, configs = False, []
    path = Path(written.shards.folder) / "recipe.yaml"
    if path.is_file():
        with contextlib.suppress(SteelyardError):  # another program's recipe, with other options
            recipe = load_recipe(path)
            nearest = all(algorithm.rounds_to_nearest for algorithm in recipe.algorithms())
            made = [modifier.quantization_config() for modifier in recipe.modifiers]
            configs = [config for config in made if config is not None]
    if not configs:
        return None, nearest
    groups = [group for config in configs for group in config.config_groups.values()]
    kwargs = [g.weights.observer_kwargs or {} for g in groups if g.weights is not None]
    return any(k.get("negative_scales") is True for k in kwargs), nearest
