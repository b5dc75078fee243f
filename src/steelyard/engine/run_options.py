"""The options of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.data.limits import check_numbers
from steelyard.errors import DataError, nearest

__all__ = ["PIPELINES", "UNCALIBRATED", "Options"]

PIPELINES = ("auto", "sequential", "basic", "datafree")
UNCALIBRATED = ("error", "weights-only")
COLLATORS = ("truncation", "padding")
MAX_SEQ_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of `oneshot`."""

    model: Any
    """A folder, a name on the hub, or a loaded module, which is changed in place."""
    recipe: Any = None
    """A .yaml file, YAML text, a modifier or a list of modifiers: see `load_recipe`."""
    dataset: Any = None
    """Calibration data, if the recipe needs any: see `steelyard.data.samples.load_samples`."""
    output_dir: str | Path | None = None
    """Folder for the checkpoint; optional for a loaded module, or to save only statistics."""
    tokenizer: Any = None
    """Tokenizer, or its folder; None uses that of the model."""
    processor: Any = None
    """Processor for images or audio, or its folder; None uses that of the model."""
    num_calibration_samples: int = 512
    """Largest number of samples to use."""
    max_seq_length: int | None = MAX_SEQ_LENGTH
    """Largest number of tokens per sample; None for 2048."""
    batch_size: int = 1
    """Samples per forward."""
    data_collator: str | Callable[[list[Any]], Any] = "truncation"
    """Collates `batch_size` rows into one batch. "truncation" and "padding" are llm-compressor's
    names for batches of text; here those hold samples of equal length, without padding."""
    text_column: str = "text"
    """Column of the dataset that holds the text."""
    splits: str | None = None
    """Split of the dataset, such as "train[:512]"."""
    shuffle_calibration_samples: bool = True
    """Draw samples at random; False uses the first ones."""
    seed: int = 0
    """Seed of the random draw."""
    pipeline: str = "auto"
    """sequential (layer by layer), basic (the whole model at once), or datafree (file by file);
    auto chooses datafree if no data is needed, else sequential."""
    propagate_error: bool | None = None
    """Give each layer the output of the quantized layers before it. That costs a second pass unless
    an algorithm solves modules in the order of their calls; None lets the algorithms decide."""
    uncalibrated: str = "error"
    """What to do with modules that saw no token: error, or weights-only."""
    moe_calibrate_all_experts: bool = True
    """Whether the input ranges of an expert cover all tokens, not only those routed to it;
    Hessians and importance always use its own tokens."""
    save_statistics: str | Path | None = None
    """File to save the statistics of all observers to: see `steelyard.engine.statistics`."""
    statistics: str | Path | None = None
    """Statistics file to use instead of a dataset."""
    overwrite: bool = False
    """Replace a checkpoint in `output_dir`."""
    resume: bool = True
    """Resume an unfinished run for the same output; False starts anew."""
    dry_run: bool = False
    """Stop after the plan."""
    model_revision: str | None = None
    """Revision of a model on the hub."""
    trust_remote_code_model: bool = False
    """Run the Python code that the checkpoint contains."""
    show_progress: bool | None = None
    """Show plan and progress; None shows them on a terminal."""

    def check(self) -> None:
        """Raise for invalid values."""
        _one_of("pipeline", self.pipeline, PIPELINES)
        _one_of("uncalibrated", self.uncalibrated, UNCALIBRATED)
        if not callable(self.data_collator):
            _one_of("data_collator", self.data_collator, COLLATORS)
        check_numbers(
            num_calibration_samples=self.num_calibration_samples,
            max_seq_length=self.sequence_length,
            batch_size=self.batch_size,
            seed=self.seed,
        )

    def refuse_two_sources(self) -> None:
        if self.statistics is not None and self.dataset is not None:
            raise DataError("statistics= replaces calibration data: remove the dataset")

    @property
    def collator(self) -> Callable[[list[Any]], Any] | None:
        return self.data_collator if callable(self.data_collator) else None

    @property
    def sequence_length(self) -> int:
        return MAX_SEQ_LENGTH if self.max_seq_length is None else self.max_seq_length


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known: {nearest(str(value), allowed)}")
