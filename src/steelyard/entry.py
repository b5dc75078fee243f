"""`steelyard.oneshot`: quantizes a model, and writes a report beside the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.engine.oneshot import quantize
from steelyard.engine.result import Result
from steelyard.engine.run_options import Options
from steelyard.report import write_report

__all__ = ["oneshot"]


def oneshot(
    model: Any,
    recipe: Any = None,
    dataset: Any = None,
    output_dir: str | Path | None = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = 2048,
    batch_size: int = 1,
    data_collator: str | Callable[[list[Any]], Any] = "truncation",
    text_column: str = "text",
    splits: str | None = None,
    shuffle_calibration_samples: bool = True,
    seed: int = 0,
    pipeline: str = "auto",
    propagate_error: bool | None = None,
    uncalibrated: str = "error",
    moe_calibrate_all_experts: bool = True,
    save_statistics: str | Path | None = None,
    statistics: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    model_revision: str | None = None,
    trust_remote_code_model: bool = False,
    show_progress: bool | None = None,
) -> Result:
    """Quantize a model; `steelyard.engine.run_options.Options` documents each option."""
    given = locals()
    return quantize(Options(**given), add_report=write_report)
