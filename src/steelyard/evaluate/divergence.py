"""Runs two checkpoints on the same samples and compares their predictions of each next token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from steelyard.data.limits import learned_positions
from steelyard.data.samples import Inputs, Samples, load_samples
from steelyard.data.tokenizer import processor_of, tokenizer_of
from steelyard.engine.progress import progress, say
from steelyard.errors import DataError
from steelyard.evaluate.comparable import check_pair, check_tokenizers
from steelyard.evaluate.evaluation import Evaluation, EvaluationInterrupted
from steelyard.evaluate.metrics import Scores, score, summarize
from steelyard.evaluate.scored_tokens import check_scorable, placeholder_ids, scored_targets
from steelyard.model.activations import HiddenStates, room_for
from steelyard.model.blocks import Batch
from steelyard.model.cost import Costs, estimate_seconds
from steelyard.model.inputs import check_inputs
from steelyard.model.layerwise import DTYPE, LayerwiseModel, default_memory
from steelyard.model.opening import open_model
from steelyard.model.placement import placement_of
from steelyard.words import duration

__all__ = ["Scored", "evaluate"]

_PROJECTED = 1 << 24  # logits of one model computed at a time: 64 MB
_SCORED = 1 << 20  # logits scored at a time, so that they fit a CPU cache in fp64


@dataclass(frozen=True)
class Scored:
    """Two models, and the samples that they were compared on.

    chosen: which next tokens were scored, (batch, seq - 1) bool
    scores: of those, batch by batch
    """

    base: LayerwiseModel
    quantized: LayerwiseModel
    evaluation: Evaluation
    batches: list[Inputs]
    chosen: list[torch.Tensor]
    scores: list[Scores]


def evaluate(
    base: str | Path,
    quantized: str | Path,
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
    device: Any = "auto",
    memory: int | None = None,
    trust_remote_code_model: bool = False,
    show_progress: bool | None = None,
    then: Callable[[Scored], object] | None = None,
) -> Evaluation:
    """Compare a quantized checkpoint with its base model.

    base:      a folder or a name on the hub
    quantized: a folder or a name on the hub, of a compressed-tensors or an unquantized checkpoint
    data:      as in `steelyard.data.samples.load_samples`; use text that calibration did not. The
               first `num_samples` are used, in order. A text file is split into pieces of
               max_seq_length tokens, each with the tokenizer's BOS token; each row of a list or a
               dataset is a sample, truncated to max_seq_length. Mappings with pixels or audio
               features, as a processor returns them, go to the model as they are; rows with images
               or audio, and `messages` with them, go through the processor.
    tokenizer: the base model's by default
    processor: the base model's by default; used for rows with images, videos or audio
    device:    auto, cpu, or an accelerator such as cuda, cuda:1 or xpu; auto takes torch's current
               accelerator, if there is one
    memory:    bytes of hidden states to hold in host memory, a quarter of the machine's by default;
               an accelerator holds as many as fit into a quarter of its free memory besides. If
               those of both models need more, the others go to temporary files.
               They need 8 bytes x tokens x hidden size, and the outputs of towers.
    trust_remote_code_model: run code that ships with a model or its tokenizer
    then:      called with the models, the samples and the scores, if all tokens were scored

    Every token but the first of a sample is scored, except padding and the placeholders of images,
    videos and audio. `labels` are not used. Both models run layer by layer in fp32, with
    one layer in memory at a time, and finally the output heads of both. Ctrl-C during scoring
    raises `EvaluationInterrupted` with the partial result.

    >>> evaluate("SmolLM2-135M", "SmolLM2-135M", "held-out.txt").kl_divergence
    0.0
    """
    started = time.perf_counter()
    placement = placement_of(device, base)
    opened = [open_model(model, trust_remote_code_model) for model in (base, quantized)]
    for source, _ in opened:
        source.place(placement)
    models = [LayerwiseModel(opened[0][0], "base"), LayerwiseModel(opened[1][0], "quantized")]
    check_pair(*models)
    folders = [model.source.origin for model in models]
    assert folders[0] is not None and folders[1] is not None
    check_tokenizers(folders[0], folders[1])
    positions = [learned_positions(model.source.model) for model in models]

    def check(inputs: Inputs, where: str) -> None:
        check_scorable(inputs, where)
        for model in models:
            check_inputs(model.source.model, inputs, where)

    samples = _samples(
        data,
        tokenizer=lambda: tokenizer_of(
            tokenizer or processor, models[0].source, trust_remote_code_model
        ),
        processor=lambda: processor_of(
            processor or tokenizer, models[0].source, trust_remote_code_model
        ),
        check=check,
        features_only=True,
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
    placeholders = placeholder_ids(models[0].source.model.config)
    chosen = [scored_targets(batch, placeholders) for batch in samples.batches]
    batches = [placement.bring_all(batch) for batch in samples.batches]
    to_score = sum(int(each.sum()) for each in chosen)
    if not to_score:
        raise DataError(
            f"{samples.description}: none has a second token of text, and the first is not "
            "scored; pass longer texts, or a larger max_seq_length"
        )
    tokens = sum(batch["input_ids"].numel() for batch in samples.batches)  # with padding
    nbytes = tokens * sum(model.hidden_size for model in models) * DTYPE.itemsize
    costs = [Costs(w.source.model, w.sequence.modules, tokens) for w in models]
    total = sum(cost.total() for cost in costs)
    say(_plan(samples, to_score, models, total), show_progress)
    limit = default_memory() if memory is None else memory
    notes = (samples.description, *opened[0][1], *opened[1][1])

    def result(scores: list[Scores], scored: int) -> Evaluation:
        seconds = time.perf_counter() - started
        found = asdict(summarize(scores))
        return Evaluation(str(base), str(quantized), scored, seconds=seconds, notes=notes, **found)

    with (
        HiddenStates(replace(room_for("auto", placement.device), host=limit), nbytes) as held,
        progress("evaluating", total, show_progress, unit="work") as advance,
    ):
        ends = [
            model.run(batches, held, cost, advance)
            for model, cost in zip(models, costs, strict=True)
        ]
        scores: list[Scores] = []
        scored = 0
        try:
            with models[0].head(), models[1].head():
                advance(sum(cost.outside for cost in costs), "both models, scoring")
                for *pair, which in zip(*ends, chosen, strict=True):
                    parts = list(_scores(models, pair, which))
                    scores += [Scores.joined(parts)] if parts else []
                    input_ids = pair[0].inputs["input_ids"]
                    scored += len(input_ids)
                    work = sum(cost.scoring(input_ids.numel()) for cost in costs)
                    advance(work, "both models, scoring")
        except KeyboardInterrupt as interrupt:
            if not scores:
                raise
            raise EvaluationInterrupted(result(scores, scored), to_score) from interrupt
    found = result(scores, scored)
    if then is not None:
        inputs = [
            batch for batch, which in zip(samples.batches, chosen, strict=True) if which.any()
        ]
        masks = [which for which in chosen if which.any()]
        then(Scored(models[0], models[1], found, inputs, masks, scores))
    return found


def _plan(samples: Samples, to_score: int, models: list[LayerwiseModel], total: float) -> str:
    """Return one line on the amount of work and its estimated time."""
    layers = [len(model.sequence.layers) for model in models]
    steps = len(samples.batches) * (sum(layers) + 3)
    about = duration(estimate_seconds(total, steps, models[0].hidden_size))
    return (
        f"evaluating {to_score:,} tokens of {samples.num_samples:,} samples, in "
        f"{len(samples.batches):,} batches through {layers[0]} layers of each model: about {about}"
    )


@torch.no_grad()
def _scores(
    models: list[LayerwiseModel], pair: list[Batch], chosen: torch.Tensor
) -> Iterator[Scores]:
    """Compare the two models on one batch, a few positions at a time.

    chosen: which next tokens to score, (batch, seq - 1) bool
    """
    input_ids = pair[0].inputs["input_ids"]
    rows, length = input_ids.shape
    vocab_size = models[0].vocab_size
    step = max(1, _PROJECTED // (rows * vocab_size))
    for start in range(0, length - 1, step):
        positions = slice(start, min(start + step, length - 1))
        which = chosen[:, positions].flatten()
        if not which.any():
            continue
        which = which.to(input_ids.device)
        logits = [
            model.logits(batch, positions).flatten(0, 1)
            for model, batch in zip(models, pair, strict=True)
        ]
        targets = input_ids[:, start + 1 : positions.stop + 1].flatten()
        if not which.all():
            logits, targets = [each[which] for each in logits], targets[which]
        some = max(1, _SCORED // vocab_size)
        for first in range(0, len(targets), some):
            part = slice(first, first + some)
            yield score(logits[0][part], logits[1][part], targets[part])


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
