"""`steelyard.oneshot`: quantizes a model, and writes a report beside the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.engine.oneshot import quantize
from steelyard.engine.result import Result
from steelyard.engine.run_log import run_log
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
    splits: str | Sequence[str] | Mapping[str, str] | None = None,
    shuffle_calibration_samples: bool = True,
    seed: int = 0,
    pipeline: str | None = "auto",
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
    stage: str | None = None,
    save_compressed: bool = True,
    precision: str = "auto",
    tie_word_embeddings: bool = True,
    config_name: str | None = None,
    dataset_config_name: str | None = None,
    dataset_path: str | Path | None = None,
    raw_kwargs: Mapping[str, Any] | None = None,
    streaming: bool = False,
    preprocessing_func: str | Callable[[Any], Any] | None = None,
    concatenate_data: bool = False,
    use_loss_mask: bool = False,
    sequential_targets: str | Sequence[str] | None = None,
    log_dir: str | Path | None = None,
    dvc_data_repository: str | None = None,
    recipe_args: Mapping[str, Any] | Sequence[str] | None = None,
    clear_sparse_session: bool = False,
    quantization_aware_calibration: bool = True,
    tracing_ignore: Sequence[str] | None = None,
    sequential_offload_device: Any = "cpu",
    sequential_prefetch: bool = False,
    sequential_targets_per_subgraph: int = 1,
    min_tokens_per_module: float | None = None,
    pad_to_max_length: bool = False,
    overwrite_cache: bool = False,
    preprocessing_num_workers: int | None = None,
    dataloader_num_workers: int = 0,
    remove_columns: str | Sequence[str] | None = None,
) -> Result:
    """Quantize a model; `steelyard.engine.run_options.Options` documents each option."""
    given = locals()
    options = Options(**given)
    with run_log(options.log_dir) as log:
        result = quantize(options, add_report=write_report)
        log.finish(result)
    return result
