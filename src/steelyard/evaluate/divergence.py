"""Runs two checkpoints on a text and compares their predictions of each next token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steelyard.data.limits import learned_positions
from steelyard.data.samples import Samples, load_samples
from steelyard.data.tokenizer import tokenizer_of
from steelyard.engine.progress import progress, say
from steelyard.errors import DataError
from steelyard.evaluate.comparable import check_pair, check_tokenizers
from steelyard.evaluate.cost import Costs, estimate_seconds
from steelyard.evaluate.evaluation import Evaluation, EvaluationInterrupted
from steelyard.evaluate.layerwise import DTYPE, HiddenStates, LayerwiseModel, default_memory
from steelyard.evaluate.metrics import Scores, score, summarize
from steelyard.evaluate.opening import open_model
from steelyard.model.blocks import Batch
from steelyard.words import duration

__all__ = ["evaluate"]

_PROJECTED = 1 << 24  # logits of one model computed at a time: 64 MB
_SCORED = 1 << 20  # logits scored at a time, so that they fit a CPU cache in fp64


def evaluate(
    base: str | Path,
    quantized: str | Path,
    data: Any,
    *,
    tokenizer: Any = None,
    num_samples: int = 128,
    max_seq_length: int = 2048,
    batch_size: int = 1,
    text_column: str = "text",
    split: str | None = None,
    seed: int = 0,
    memory: int | None = None,
    trust_remote_code_model: bool = False,
    show_progress: bool | None = None,
) -> Evaluation:
    """Compare a quantized checkpoint with its base model.

    base:      a folder or a name on the hub
    quantized: a folder or a name on the hub, of a compressed-tensors or an unquantized checkpoint
    data:      as in `steelyard.data.samples.load_samples`; use text that calibration did not. The
               first `num_samples` are used, in order. A text file is split into pieces of
               max_seq_length tokens, each with the tokenizer's BOS token; each row of a list or a
               dataset is a sample, truncated to max_seq_length.
    tokenizer: the base model's by default
    memory:    bytes of hidden states to hold in memory, a quarter of the machine's by default; if
               those of both models need more, all go to temporary files.
               They need 8 bytes x tokens x hidden size.
    trust_remote_code_model: run code that ships with a model or its tokenizer

    Every token but the first of a sample is scored. Both models run layer by layer in fp32, with
    one layer in memory at a time, and finally the output heads of both. Ctrl-C during scoring
    raises `EvaluationInterrupted` with the partial result.

    >>> evaluate("SmolLM2-135M", "SmolLM2-135M", "held-out.txt").kl_divergence
    0.0
    """
    started = time.perf_counter()
    opened = [open_model(model, trust_remote_code_model) for model in (base, quantized)]
    models = [LayerwiseModel(opened[0][0], "base"), LayerwiseModel(opened[1][0], "quantized")]
    check_pair(*models)
    folders = [model.source.origin for model in models]
    assert folders[0] is not None and folders[1] is not None
    check_tokenizers(folders[0], folders[1])
    positions = [learned_positions(model.source.model) for model in models]
    samples = _samples(
        data,
        tokenizer=lambda: tokenizer_of(tokenizer, models[0].source, trust_remote_code_model),
        num_calibration_samples=num_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        text_column=text_column,
        split=split,
        shuffle=False,
        seed=seed,
        vocab_size=models[0].vocab_size,
        max_positions=min((p for p in positions if p is not None), default=None),
    )
    nbytes = samples.num_tokens * sum(model.hidden_size for model in models) * DTYPE.itemsize
    costs = [Costs(w.source.model, w.sequence.modules, samples.num_tokens) for w in models]
    total = sum(cost.total() for cost in costs)
    say(_plan(samples, models, total), show_progress)
    limit = default_memory() if memory is None else memory
    notes = (samples.description, *opened[0][1], *opened[1][1])

    def result(scores: list[Scores], scored: int) -> Evaluation:
        seconds = time.perf_counter() - started
        found = asdict(summarize(scores))
        return Evaluation(str(base), str(quantized), scored, seconds=seconds, notes=notes, **found)

    with (
        HiddenStates(nbytes, limit) as held,
        progress("evaluating", total, show_progress, unit="work") as advance,
    ):
        ends = [
            model.run(samples.batches, held, cost, advance)
            for model, cost in zip(models, costs, strict=True)
        ]
        scores: list[Scores] = []
        scored = 0
        try:
            with models[0].head(), models[1].head():
                advance(sum(cost.outside for cost in costs), "both models, scoring")
                for pair in zip(*ends, strict=True):
                    scores += list(_scores(models, pair))
                    scored += len(pair[0].inputs["input_ids"])
                    tokens = pair[0].inputs["input_ids"].numel()
                    advance(sum(cost.scoring(tokens) for cost in costs), "both models, scoring")
        except KeyboardInterrupt as interrupt:
            if not scores:
                raise
            raise EvaluationInterrupted(result(scores, scored), _scored(samples)) from interrupt
    return result(scores, samples.num_samples)


def _plan(samples: Samples, models: list[LayerwiseModel], total: float) -> str:
    """Return one line on the amount of work and its estimated time."""
    layers = [len(model.sequence.layers) for model in models]
    steps = len(samples.batches) * (sum(layers) + 3)
    about = duration(estimate_seconds(total, steps, models[0].hidden_size))
    return (
        f"evaluating {_scored(samples):,} tokens of {samples.num_samples:,} samples, in "
        f"{len(samples.batches):,} batches through {layers[0]} layers of each model: about {about}"
    )


def _scored(samples: Samples) -> int:
    """Return the number of tokens to score: all but the first of each sample."""
    return samples.num_tokens - samples.num_samples


def _scores(models: list[LayerwiseModel], pair: tuple[Batch, ...]) -> Iterator[Scores]:
    """Compare the two models on one batch, a few positions at a time."""
    input_ids = pair[0].inputs["input_ids"]
    rows, length = input_ids.shape
    vocab_size = models[0].vocab_size
    step = max(1, _PROJECTED // (rows * vocab_size))
    for start in range(0, length - 1, step):
        positions = slice(start, min(start + step, length - 1))
        logits = [
            model.logits(batch, positions).flatten(0, 1)
            for model, batch in zip(models, pair, strict=True)
        ]
        targets = input_ids[:, start + 1 : positions.stop + 1].flatten()
        some = max(1, _SCORED // vocab_size)
        for first in range(0, len(targets), some):
            part = slice(first, first + some)
            yield score(logits[0][part], logits[1][part], targets[part])


def _samples(data: Any, **options: Any) -> Samples:
    """Load the data; errors use the argument names of `evaluate`."""
    try:
        samples = load_samples(data, **options)
    except DataError as error:
        message = str(error).replace("num_calibration_samples", "num_samples")
        message = message.replace("splits=", "split=").replace("calibration data", "data")
        raise DataError(message) from error
    if all(batch["input_ids"].shape[1] < 2 for batch in samples.batches):
        raise DataError(
            f"{samples.description}: none has a second token, and the first is not scored; pass "
            "longer texts, or a larger max_seq_length"
        )
    return samples
