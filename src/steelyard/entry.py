"""`steelyard.oneshot`: quantizes a model, and writes a report beside the checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from steelyard.engine.oneshot import quantize
from steelyard.engine.result import Result
from steelyard.engine.run_log import run_log
from steelyard.engine.run_options import Options
from steelyard.errors import PlanError
from steelyard.modifiers import QuantizationModifier
from steelyard.report import write_report

__all__ = ["Oneshot", "model_free_ptq", "oneshot"]


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
    device: Any = "auto",
    activations: str = "auto",
    pipeline: str | None = "auto",
    propagate_error: bool | None = None,
    uncalibrated: str = "error",
    uncalibratable: str = "note",
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


class Oneshot:
    """A run that is set up first and started by a call, as in llm-compressor.

    model:  the module that was passed, or the name or folder of a model
    result: that of the call
    """

    def __init__(self, log_dir: str | Path | None = None, **options: Any) -> None:
        self.options = Options(log_dir=log_dir, **options)
        self.options.check()
        self.model = self.options.model
        self.recipe = self.options.recipe
        self.result: Result | None = None

    def __call__(self) -> None:
        self.result = oneshot(**{f.name: getattr(self.options, f.name) for f in fields(Options)})
        self.model = self.model if self.result.model is None else self.result.model


@contextlib.contextmanager
def _converted(model: Any, output: str | Path, converter: Any, workers: int) -> Iterator[Path]:
    """Convert a checkpoint into a temporary folder, which is removed afterwards."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint

    if not hasattr(converter, "process"):
        raise PlanError(
            f"converter={converter!r} is no Converter of compressed_tensors.entrypoints.convert"
        )
    beside = Path(output).resolve().parent  # as large as the checkpoint, so not in /tmp
    beside.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="converted-", dir=beside) as folder:
        convert_checkpoint(
            model_stub=model, save_directory=folder, converter=converter, max_workers=workers
        )
        yield Path(folder)


def model_free_ptq(
    model_stub: str | Path,
    save_directory: str | Path,
    scheme: QuantizationScheme | str | None = None,
    config: QuantizationConfig | None = None,
    ignore: Iterable[str] = (),
    max_workers: int = 1,
    device: Any = None,
    converter: Any = None,
) -> Result:
    """Quantize a folder or a model on the hub file by file, without data and model classes.

    scheme:              a preset, or a scheme with its targets
    config:              several schemes, instead of `scheme`
    max_workers, device: no effect: threads and devices are chosen as for any run
    converter:           of compressed-tensors, such as a dequantizer: the checkpoint is converted
                         first, into a temporary folder beside `save_directory`
    """
    if (scheme is None) == (config is None):
        raise PlanError("give either scheme or config")
    if converter is not None:
        with _converted(model_stub, save_directory, converter, max_workers) as folder:
            result = model_free_ptq(folder, save_directory, scheme, config, ignore)
        result.notes.append(f"{model_stub} was converted first, by {type(converter).__name__}")
        return result
    ignored = [*(config.ignore or () if config is not None else ()), *ignore]
    options: dict[str, Any] = {"ignore": ignored}
    if config is not None:
        options |= {"config_groups": config.config_groups}
        options |= {"kv_cache_scheme": config.kv_cache_scheme}
    elif isinstance(scheme, QuantizationScheme):
        options["config_groups"] = {"group_0": scheme}
    else:
        options["scheme"] = scheme
    recipe = QuantizationModifier(**options)
    return oneshot(model_stub, recipe, None, save_directory, overwrite=True)
