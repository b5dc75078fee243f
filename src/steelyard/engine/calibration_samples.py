"""Loads the calibration samples of a run, if the recipe needs any."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.algorithms import Algorithm, needs_data
from steelyard.data.hub_datasets import Loading, split_of
from steelyard.data.known_datasets import DEMO
from steelyard.data.limits import learned_positions
from steelyard.data.preprocessing import row_function
from steelyard.data.samples import HARDLY_ANY_TOKENS, Samples, load_samples
from steelyard.data.tokenizer import processor_of, tokenizer_of
from steelyard.distributed import Ranks
from steelyard.engine.announce import announce
from steelyard.engine.rank_agreement import joined_over_ranks
from steelyard.engine.result import Result
from steelyard.engine.run_options import Options
from steelyard.engine.statistics import RunStatistics
from steelyard.errors import CalibrationWarning, DataError, warn_caller
from steelyard.model.inputs import LOSS_MASK, check_inputs
from steelyard.model.source import Source

__all__ = ["CalibrationLoader", "samples_for"]

DEMO_WARNING = (
    "calibrating on the built-in text, which is Python source code: scales and rounding fit that, "
    "not what the model is used for; pass data of your own for a model that you ship"
)

LOSS_MASK_NOTE = (
    "tokens whose loss_mask is 0 are in no statistic: static ranges of activations leave them out"
)


def samples_for(
    options: Options,
    algorithms: Sequence[Algorithm],
    source: Source,
    tokenizer: Any,
    statistics: RunStatistics,
    result: Result,
    shown: bool,
    load: CalibrationLoader,
) -> Samples | None:
    """Return the calibration samples and describe them in the notes; None if none are needed."""
    needed = needs_data(algorithms)
    if options.route == "datafree" and needed and options.statistics is None:
        raise DataError('the recipe needs calibration data, so pipeline="datafree" cannot run it')
    if needed and not load.given and options.statistics is None:
        raise DataError(
            "the recipe needs calibration data (static activations, a KV cache or importance): "
            "pass dataset=, or the statistics= of an earlier run"
        )
    if load.given and not needed and not result.recipe.chosen:
        note = "the recipe needs no calibration data; the dataset is not read"
        result.notes.append(note)
        warn_caller(note)
    if options.statistics is not None:
        result.notes.append(statistics.describe(source))
        return None
    if not needed:
        return None
    samples = load(source, tokenizer)
    if options.dataset == DEMO:
        result.notes.append(DEMO_WARNING)
        result.warnings.append(DEMO_WARNING)
        warn_caller(DEMO_WARNING, CalibrationWarning)
    for number, batch in enumerate(samples.batches):
        check_inputs(source.model, batch, f"batch {number}")
        _check_loss_mask(batch, number, options.use_loss_mask)
    if options.use_loss_mask:
        result.notes.append(LOSS_MASK_NOTE)
    for algorithm in algorithms:
        algorithm.check_samples(samples)
    result.notes.append(samples.description)
    if few := samples.shortage():
        result.notes.append(few)
        result.warnings.append(few)
        if shown:
            announce(f"warning: {few}")
        elif samples.num_tokens < HARDLY_ANY_TOKENS:  # almost certainly a mistake
            warn_caller(few, CalibrationWarning)
    statistics.begin(source, result.source, result.recipe.text, samples)
    return samples


class CalibrationLoader:
    """Loads the calibration samples of a run, once: a generator cannot be read twice."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.options = options
        self.ranks = ranks
        self._samples: Samples | None = None

    @property
    def given(self) -> bool:
        return self.options.dataset is not None or self.options.dataset_path is not None

    def __call__(self, source: Source, tokenizer: Any) -> Samples:
        """Return the samples; every rank must call this the first time."""
        if self._samples is None:
            self._samples = _load(self.options, source, tokenizer, self.ranks)
        return self._samples


def _load(options: Options, source: Source, tokenizer: Any, ranks: Ranks) -> Samples:
    """Return the samples that the options select, those of all ranks."""
    text_config = source.model.config.get_text_config()
    samples = load_samples(
        options.dataset,
        tokenizer=lambda: tokenizer_of(tokenizer, source, options.trust_remote_code_model),
        num_calibration_samples=options.num_calibration_samples,
        max_seq_length=options.sequence_length,
        batch_size=options.batch_size,
        text_column=options.text_column,
        loading=Loading(
            split_of(options.splits),
            options.dataset_config_name,
            options.dataset_path,
            options.streaming,
            options.raw_kwargs or {},
        ),
        shuffle=options.shuffle_calibration_samples,
        seed=options.seed,
        vocab_size=getattr(text_config, "vocab_size", None),
        max_positions=learned_positions(source.model),
        check=functools.partial(check_inputs, source.model),
        data_collator=options.collator,
        processor=lambda: processor_of(
            options.processor or tokenizer, source, options.trust_remote_code_model
        ),
        preprocess=row_function(options.preprocessing_func),
        concatenate=options.concatenate_data,
    )
    return joined_over_ranks(samples, ranks, options.batch_size)


def _check_loss_mask(batch: Mapping[str, Any], number: int, used: bool) -> None:
    """Raise unless a batch has a loss_mask exactly if it is used."""
    mask = batch.get(LOSS_MASK)
    if mask is None and used:
        raise DataError(
            f"use_loss_mask=True: batch {number} has no loss_mask; add that column, with 1 for "
            "each token that counts"
        )
    if mask is not None and not used:
        raise DataError(
            f"batch {number} has a loss_mask; pass use_loss_mask=True, or remove the column"
        )
    if mask is not None and mask.shape != batch["input_ids"].shape:
        raise DataError(
            f"batch {number}: loss_mask has shape {tuple(mask.shape)}, input_ids "
            f"{tuple(batch['input_ids'].shape)}; pass one number for each token"
        )
