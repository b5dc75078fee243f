"""What provenance.json states about a run: digests of its inputs, its options and its figures."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steelyard.algorithms import Algorithm, ModuleResult
from steelyard.checkpoint.provenance import CalibrationRecord, RunRecord
from steelyard.engine.identity import digest_of, versions
from steelyard.engine.run_options import Options

__all__ = ["effective_options", "input_digests", "record_of"]

_OF_DATA = (
    "num_calibration_samples",
    "max_seq_length",
    "batch_size",
    "seed",
    "shuffle_calibration_samples",
    "text_column",
    "splits",
    "concatenate_data",
    "dataset_config_name",
)
"""Options that select and cut the calibration data."""
_OTHERS = ("uncalibrated", "precision", "stage")


def effective_options(options: Options, propagate: bool) -> dict[str, Any]:
    """Return the options that the result depends on, beside the data; a run resumes only with the
    same."""
    return {
        "pipeline": options.route,
        "propagate_error": propagate,
        "moe_calibrate_all_experts": options.moe_calibrate_all_experts,
        "uncalibratable": options.uncalibratable,
        "save_compressed": options.save_compressed,
        "tie_word_embeddings": options.tie_word_embeddings,
    }


def input_digests(algorithms: Sequence[Algorithm]) -> dict[str, str]:
    """Return digests of the files that algorithms read."""
    return {name: digest for each in algorithms for name, digest in each.digests().items()}


def record_of(
    recipe: str,
    batches: Sequence[Mapping[str, torch.Tensor]],
    algorithms: Sequence[Algorithm],
    statistics: Mapping[str, Any],
    options: Options,
    propagate: bool,
    modules: Mapping[str, ModuleResult],
) -> RunRecord:
    """Return the record of a run.

    recipe:     its text
    batches:    the calibration data
    statistics: digests of the statistics file, if one was given
    """
    inputs = {Path(name).name: digest for name, digest in input_digests(algorithms).items()}
    if "statistics" in statistics:
        inputs["statistics"] = str(statistics["statistics"])
    names = (*_OTHERS, *(_OF_DATA if batches else ()))
    given = {name: getattr(options, name) for name in names}
    plain = {name: value for name, value in given.items() if _is_plain(value)}
    errors = [result.error for result in modules.values() if result.error is not None]
    figures = {"modules": float(len(modules))}
    if errors:  # fsum is exact, whatever the order of the modules
        figures["mean_weight_error"] = math.fsum(errors) / len(errors)
    return RunRecord(
        versions=versions(),
        recipe=hashlib.sha256(recipe.encode()).hexdigest(),
        calibration=_calibration(batches),
        inputs=inputs,
        options={**effective_options(options, propagate), **plain},
        figures=figures,
    )


def _calibration(batches: Sequence[Mapping[str, torch.Tensor]]) -> CalibrationRecord | None:
    if not batches:
        return None
    tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
    return CalibrationRecord(sha256=digest_of(batches), batches=len(batches), tokens=tokens)


def _is_plain(value: object) -> bool:
    return value is not None and isinstance(value, (str, int, float, bool))
