"""Options of llm-compressor that change nothing here, and options that are refused.

A script may give an idle option any value; the notes of the run have one line for each that differs
from its default. A refused option raises before any work, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.errors import DataError, PlanError

if TYPE_CHECKING:
    from steelyard.engine.run_options import Options

__all__ = ["IDLE", "idle_notes", "refuse"]

_IN_ORDER = "layers are found without tracing, and run one at a time"
_NO_CACHE = "rows are read and tokenized once, as they are needed; nothing is cached"

IDLE = {
    "recipe_args": "no modifier refers to recipe arguments",
    "clear_sparse_session": "nothing is kept between two calls",
    "quantization_aware_calibration": "llm-compressor ignores it too; see propagate_error",
    "tracing_ignore": _IN_ORDER,
    "sequential_offload_device": "hidden states stay where the model is computed",
    "sequential_prefetch": _IN_ORDER,
    "sequential_targets_per_subgraph": _IN_ORDER,
    "min_tokens_per_module": "the report has the tokens of each expert, and names those with few",
    "pad_to_max_length": "samples are never padded, and padding is kept out of statistics",
    "overwrite_cache": _NO_CACHE,
    "preprocessing_num_workers": _NO_CACHE,
    "dataloader_num_workers": _NO_CACHE,
    "remove_columns": "columns that are not needed are not read",
}
"""Option -> why its value does not matter."""


def idle_notes(options: Options) -> Iterator[str]:
    """Yield a sentence for each idle option that differs from its default."""
    if options.recipe is None:
        yield "without a recipe nothing is quantized: the model is written as it is"
    for field in fields(options):
        if field.name in IDLE and (value := getattr(options, field.name)) != field.default:
            yield f"{field.name}={_short(value)} has no effect: {IDLE[field.name]}"


def refuse(options: Options) -> None:
    """Raise for options of llm-compressor that cannot have their effect here."""
    if options.config_name not in (None, options.model) and not _is_own(options):
        raise PlanError(
            f"config_name={options.config_name!r}: a model is read with its own config.json; load "
            "it with AutoModelForCausalLM.from_pretrained(model, config=...) and pass the module"
        )
    if options.dvc_data_repository is not None:
        raise DataError(
            "dvc_data_repository: data is not read through dvc; run `dvc get`, and pass the file "
            "as the dataset"
        )


def _is_own(options: Options) -> bool:
    model, config = options.model, options.config_name
    if not isinstance(model, (str, Path)) or config is None:
        return False
    return Path(config).resolve() in (Path(model).resolve(), Path(model).resolve() / "config.json")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
