"""Two checkpoints and a text: walk both, then compare what they expect of each next token."""

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
from steelyard.evaluate.cost import Costs, seconds_of
from steelyard.evaluate.evaluation import Evaluation, EvaluationInterrupted
from steelyard.evaluate.metrics import Scores, score, summarize
from steelyard.evaluate.opening import open_model
from steelyard.evaluate.walking import DTYPE, HiddenStates, Walk, default_memory
from steelyard.model.blocks import Batch
from steelyard.words import duration

__all__ = ["evaluate"]

_PROJECTED = 1 << 24  # logits of one model at a time: 64 MB
_SCORED = 1 << 20  # of them, which a processor's cache should hold in fp64


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
    """Compare a quantized checkpoint with the model that it was made from.

    base:      a folder or a name on the hub
    quantized: the same, of a compressed-tensors checkpoint; one that is not quantized is taken as
               it is
    data:      see `steelyard.data.samples.load_samples`; text that was not calibrated with.
               The first `num_samples` are taken, in their order. A text file is cut into pieces of
               max_seq_length tokens from its start on, with the token that starts a text before
               each; of a list or a dataset each row is a sample, cut to max_seq_length.
    tokenizer: the base's, unless one is given
    memory:    bytes of hidden states that may be held in memory, a quarter of the machine's by
               default; where those of both models exceed it, all go to temporary files.
               They take 8 bytes x tokens x hidden size.
    trust_remote_code_model: run the code that a model or its tokenizer brings

    Every token but the first of a sample is scored. Both models run layer by layer in fp32, so one
    layer at a time is in memory, and at the end what follows the layers, of both. An interrupt
    while tokens are scored is raised as `EvaluationInterrupted`, with what was found so far.

    >>> evaluate("SmolLM2-135M", "SmolLM2-135M", "held-out.txt").kl_divergence
    0.0
    """
    started = time.perf_counter()
    opened = [open_model(model, trust_remote_code_model) for model in (base, quantized)]
    walks = [Walk(opened[0][0], "base"), Walk(opened[1][0], "quantized")]
    check_pair(*walks)
    folders = [walk.source.origin for walk in walks]
    assert folders[0] is not None and folders[1] is not None
    check_tokenizers(folders[0], folders[1])
    positions = [learned_positions(walk.source.model) for walk in walks]
    samples = _samples(
        data,
        tokenizer=lambda: tokenizer_of(tokenizer, walks[0].source, trust_remote_code_model),
        num_calibration_samples=num_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        text_column=text_column,
        split=split,
        shuffle=False,
        seed=seed,
        vocab_size=walks[0].vocab_size,
        max_positions=min((p for p in positions if p is not None), default=None),
    )
    nbytes = samples.num_tokens * sum(walk.hidden_size for walk in walks) * DTYPE.itemsize
    costs = [Costs(w.source.model, w.sequence.layers, samples.num_tokens) for w in walks]
    total = sum(cost.total() for cost in costs)
    say(_plan(samples, walks, total), show_progress)
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
            walk.run(samples.batches, held, cost, advance)
            for walk, cost in zip(walks, costs, strict=True)
        ]
        scores: list[Scores] = []
        scored = 0
        try:
            with walks[0].head(), walks[1].head():
                advance(sum(cost.outside for cost in costs), "both models, scoring")
                for pair in zip(*ends, strict=True):
                    scores += list(_scores(walks, pair))
                    scored += len(pair[0].input_ids)
                    tokens = pair[0].input_ids.numel()
                    advance(sum(cost.scoring(tokens) for cost in costs), "both models, scoring")
        except KeyboardInterrupt as interrupt:
            if not scores:
                raise
            raise EvaluationInterrupted(result(scores, scored), _scored(samples)) from interrupt
    return result(scores, samples.num_samples)


def _plan(samples: Samples, walks: list[Walk], total: float) -> str:
    """Return how much there is to do, and about how long it will take."""
    layers = [len(walk.sequence.layers) for walk in walks]
    steps = len(samples.batches) * (sum(layers) + 3)
    about = duration(seconds_of(total, steps, walks[0].hidden_size))
    return (
        f"evaluating {_scored(samples):,} tokens of {samples.num_samples:,} samples, in "
        f"{len(samples.batches):,} batches through {layers[0]} layers of each model: about {about}"
    )


def _scored(samples: Samples) -> int:
    """Return how many tokens will be scored: all but the first of each sample."""
    return samples.num_tokens - samples.num_samples


def _scores(walks: list[Walk], pair: tuple[Batch, ...]) -> Iterator[Scores]:
    """Compare the two models on one batch, some positions at a time."""
    input_ids = pair[0].input_ids
    rows, length = input_ids.shape
    vocab_size = walks[0].vocab_size
    step = max(1, _PROJECTED // (rows * vocab_size))
    for start in range(0, length - 1, step):
        positions = slice(start, min(start + step, length - 1))
        logits = [
            walk.logits(batch, positions).flatten(0, 1)
            for walk, batch in zip(walks, pair, strict=True)
        ]
        targets = input_ids[:, start + 1 : positions.stop + 1].flatten()
        some = max(1, _SCORED // vocab_size)
        for first in range(0, len(targets), some):
            part = slice(first, first + some)
            yield score(logits[0][part], logits[1][part], targets[part])


def _samples(data: Any, **options: Any) -> Samples:
    """Load the data; errors name the arguments as they are called here."""
    try:
        samples = load_samples(data, **options)
    except DataError as error:
        message = str(error).replace("num_calibration_samples", "num_samples")
        message = message.replace("splits=", "split=").replace("calibration data", "data")
        raise DataError(message) from error
    if all(batch.shape[1] < 2 for batch in samples.batches):
        raise DataError(
            f"{samples.description}: none has a second token, and the first is not scored; give "
            "longer texts, or a larger max_seq_length"
        )
    return samples
