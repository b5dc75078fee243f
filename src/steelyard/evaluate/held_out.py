"""Held-out samples of an evaluation, and the tokens of them that are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from steelyard.data.limits import learned_positions
from steelyard.data.samples import Inputs, Samples, load_samples
from steelyard.data.tokenizer import processor_of, tokenizer_of
from steelyard.errors import DataError
from steelyard.evaluate.scored_tokens import check_scorable, placeholder_ids, scored_targets
from steelyard.model.inputs import check_inputs
from steelyard.model.layerwise import DTYPE
from steelyard.model.opening import open_model
from steelyard.model.source import Source

__all__ = ["HeldOut", "check_held_out", "held_out"]


@dataclass(frozen=True)
class HeldOut:
    """Samples, and which of their next tokens are scored.

    chosen: (batch, seq - 1) bool for each batch
    """

    samples: Samples
    chosen: list[torch.Tensor]

    @property
    def to_score(self) -> int:
        """Number of tokens to score."""
        return sum(int(each.sum()) for each in self.chosen)

    @property
    def rows(self) -> int:
        """Number of samples; a batch that is passed as one has several."""
        return sum(len(batch["input_ids"]) for batch in self.samples.batches)

    @property
    def tokens(self) -> int:
        """Number of tokens to run, with padding."""
        return sum(batch["input_ids"].numel() for batch in self.samples.batches)


def held_out(
    sources: Sequence[Source],
    data: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    num_samples: int = 128,
    max_seq_length: int = 2048,
    batch_size: int = 1,
    text_column: str = "text",
    split: str | None = None,
    seed: int = 0,
    trust_remote_code_model: bool = False,
) -> HeldOut:
    """Load samples that all models can run; the first is the base model.

    The arguments are those of `evaluate`.
    """
    positions = [learned_positions(source.model) for source in sources]
    base = sources[0]

    def check(inputs: Inputs, where: str) -> None:
        check_scorable(inputs, where)
        for source in sources:
            check_inputs(source.model, inputs, where)

    samples = _samples(
        data,
        tokenizer=lambda: tokenizer_of(tokenizer or processor, base, trust_remote_code_model),
        processor=lambda: processor_of(processor or tokenizer, base, trust_remote_code_model),
        check=check,
        features_only=True,
        num_calibration_samples=num_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        text_column=text_column,
        split=split,
        shuffle=False,
        seed=seed,
        vocab_size=int(base.model.config.get_text_config().vocab_size),
        max_positions=min((p for p in positions if p is not None), default=None),
    )
    placeholders = placeholder_ids(base.model.config)
    found = HeldOut(samples, [scored_targets(batch, placeholders) for batch in samples.batches])
    if not found.to_score:
        raise DataError(
            f"{samples.description}: none has a second token of text, and the first is not "
            "scored; pass longer texts, or a larger max_seq_length"
        )
    return found


def check_held_out(
    base: str | Path, data: Any, trust_remote_code_model: bool = False, **options: Any
) -> None:
    """Raise a DataError if a model cannot be evaluated on the data; no weight is read.

    options: of `evaluate`, on data
    """
    source, _ = open_model(base, trust_remote_code_model)
    held_out([source], data, trust_remote_code_model=trust_remote_code_model, **options)


def _samples(data: Any, **options: Any) -> Samples:
    """Load the data, in the types of the computation; errors use the arguments of `evaluate`."""
    try:
        samples = load_samples(data, **options)
    except DataError as error:
        message = str(error).replace("num_calibration_samples", "num_samples")
        message = message.replace("splits=", "split=").replace("calibration data", "data")
        raise DataError(message) from error
    return replace(samples, batches=[_as_computed(batch) for batch in samples.batches])


def _as_computed(inputs: Inputs) -> Inputs:
    """Return a batch with int64 token ids and fp32 features, without labels, which make a loss."""
    kept = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    floats = {n: t.to(DTYPE) for n, t in kept.items() if t.is_floating_point()}
    return {**kept, **floats, "input_ids": kept["input_ids"].long()}
