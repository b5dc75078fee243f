"""The options of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.data.limits import check_numbers
from steelyard.errors import DataError, nearest

__all__ = ["PIPELINES", "UNCALIBRATABLE", "UNCALIBRATED", "Options"]

PIPELINES = ("auto", "sequential", "basic", "datafree")
UNCALIBRATED = ("error", "weights-only")
UNCALIBRATABLE = ("note", "dynamic", "leave")
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
    splits: str | Sequence[str] | Mapping[str, str] | None = None
    """Split of the dataset, such as "train[:512]"; also as {"calibration": split}, or in a list."""
    shuffle_calibration_samples: bool = True
    """Draw samples at random; False uses the first ones."""
    seed: int = 0
    """Seed of the random draw."""
    device: Any = "auto"
    """Where a model in a folder is computed: auto, cpu, or an accelerator such as cuda, cuda:1 or
    xpu; auto takes torch's current accelerator, if there is one. A loaded module stays where it
    is, and a run without data or model class is computed on the CPU."""
    pipeline: str | None = "auto"
    """sequential (layer by layer), basic (the whole model at once), or datafree (file by file);
    auto chooses datafree if no data is needed, else sequential. None and independent, the default
    of llm-compressor, are the same as auto."""
    propagate_error: bool | None = None
    """Give each layer the output of the quantized layers before it. That costs a second pass unless
    an algorithm solves modules in the order of their calls; None lets the algorithms decide."""
    uncalibrated: str = "error"
    """What to do with modules that saw no token: error, or weights-only."""
    uncalibratable: str = "note"
    """What to do with modules whose inputs no static scale serves: note, dynamic or leave."""
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
    stage: str | None = None
    """Apply only the stages of the recipe whose name starts with this; the checkpoint goes into a
    folder of that name in `output_dir`."""
    save_compressed: bool = True
    """False writes rounded weights in their original type, without a quantization_config."""
    precision: str = "auto"
    """Type to load the weights in, such as bfloat16; auto keeps that of the files. Any other loads
    the whole model into memory, and cannot be resumed."""
    tie_word_embeddings: bool = True
    """False stores an output head that is tied to the embedding as a tensor of its own."""
    config_name: str | None = None
    """Only the model's own; another config is refused."""
    dataset_config_name: str | None = None
    """Configuration of a dataset on the hub, such as wikitext-2-raw-v1."""
    dataset_path: str | Path | None = None
    """A file (.txt, .json, .jsonl, .csv, .parquet) or a folder of them, instead of a dataset on the
    hub; `dataset` may then be "custom" or the type of the files."""
    raw_kwargs: Mapping[str, Any] | None = None
    """Further arguments of `datasets.load_dataset`."""
    streaming: bool = False
    """Read a dataset on the hub row by row, without a download of the whole."""
    preprocessing_func: str | Callable[[Any], Any] | None = None
    """Called with each row, returns the row to read; or "path/to/file.py:function"."""
    concatenate_data: bool = False
    """Join the tokens of all rows, and cut them into samples of `max_seq_length`."""
    use_loss_mask: bool = False
    """Keep tokens whose `loss_mask` is 0 out of all statistics; each row needs that column."""
    sequential_targets: str | Sequence[str] | None = None
    """Modules that run one after another. Always whole decoder layers: a target must match them, or
    modules inside them."""
    log_dir: str | Path | None = None
    """Folder for a log file of the run: plan, notes and result."""
    dvc_data_repository: str | None = None
    """Refused: download the data with dvc, and pass the file."""
    recipe_args: Mapping[str, Any] | Sequence[str] | None = None
    """No effect, see `steelyard.engine.idle_options`; so have the options below."""
    clear_sparse_session: bool = False
    """No effect."""
    quantization_aware_calibration: bool = True
    """No effect."""
    tracing_ignore: Sequence[str] | None = None
    """No effect."""
    sequential_offload_device: Any = "cpu"
    """No effect."""
    sequential_prefetch: bool = False
    """No effect."""
    sequential_targets_per_subgraph: int = 1
    """No effect."""
    min_tokens_per_module: float | None = None
    """No effect."""
    pad_to_max_length: bool = False
    """No effect."""
    overwrite_cache: bool = False
    """No effect."""
    preprocessing_num_workers: int | None = None
    """No effect."""
    dataloader_num_workers: int = 0
    """No effect."""
    remove_columns: str | Sequence[str] | None = None
    """No effect."""

    def check(self) -> None:
        """Raise for invalid values."""
        _one_of("pipeline", self.route, PIPELINES)
        _one_of("uncalibrated", self.uncalibrated, UNCALIBRATED)
        _one_of("uncalibratable", self.uncalibratable, UNCALIBRATABLE)
        if not callable(self.data_collator):
            _one_of("data_collator", self.data_collator, COLLATORS)
        without_data = self.dataset is None and self.dataset_path is None
        check_numbers(
            # 0 is llm-compressor's way to say that there is no data
            num_calibration_samples=self.num_calibration_samples or int(without_data),
            max_seq_length=self.sequence_length,
            batch_size=self.batch_size,
            seed=self.seed,
        )

    @property
    def route(self) -> str:
        """The pipeline, with the names of llm-compressor for auto resolved."""
        return "auto" if self.pipeline in (None, "independent") else str(self.pipeline)

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
