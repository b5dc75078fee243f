"""Runs two checkpoints on the same samples and compares their predictions of each next token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from steelyard.data.samples import Inputs
from steelyard.engine.progress import progress, say
from steelyard.evaluate.comparable import check_pair, check_tokenizers
from steelyard.evaluate.evaluation import Evaluation, EvaluationInterrupted
from steelyard.evaluate.evaluation_memory import LogitSizes, device_bytes
from steelyard.evaluate.held_out import HeldOut, held_out
from steelyard.evaluate.metrics import Scores, score, summarize
from steelyard.model.activations import HiddenStates, room_for
from steelyard.model.batch_forward import BatchLimit
from steelyard.model.blocks import Batch
from steelyard.model.cost import Costs, estimate_seconds
from steelyard.model.layerwise import DTYPE, LayerwiseModel, default_memory
from steelyard.model.opening import open_model
from steelyard.model.placement import placement_of
from steelyard.words import duration, size

__all__ = ["Scored", "evaluate", "evaluate_all"]


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
    runs = evaluate_all(
        base,
        [quantized],
        data,
        tokenizer=tokenizer,
        processor=processor,
        num_samples=num_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        text_column=text_column,
        split=split,
        seed=seed,
        device=device,
        memory=memory,
        trust_remote_code_model=trust_remote_code_model,
        show_progress=show_progress,
    )
    [scored] = runs  # to its end, which frees the hidden states
    if then is not None:
        then(scored)
    return scored.evaluation


def evaluate_all(
    base: str | Path,
    quantized: Sequence[str | Path],
    data: Any,
    *,
    device: Any = "auto",
    memory: int | None = None,
    trust_remote_code_model: bool = False,
    show_progress: bool | None = None,
    **options: Any,
) -> Generator[Scored, None, None]:
    """Compare several quantized checkpoints with their base model, which runs only once.

    All are checked before the first runs. The arguments are those of `evaluate`.
    """
    started = time.perf_counter()
    placement = placement_of(device, base)
    opened = [open_model(model, trust_remote_code_model) for model in (base, *quantized)]
    for source, _ in opened:
        source.place(placement)
    limit = BatchLimit()  # of both models
    first = LayerwiseModel(opened[0][0], "base", limit)
    others = [LayerwiseModel(source, "quantized", limit) for source, _ in opened[1:]]
    for other in others:
        check_pair(first, other)
        assert first.source.origin is not None and other.source.origin is not None
        check_tokenizers(first.source.origin, other.source.origin)
    options["trust_remote_code_model"] = trust_remote_code_model
    text = held_out([source for source, _ in opened], data, **options)
    batches = [placement.bring_all(batch) for batch in text.samples.batches]
    models = [first, *others]
    sizes = max(model.hidden_size for model in others) + first.hidden_size
    costs = [Costs(w.source.model, w.sequence.modules, text.tokens) for w in models]
    again = costs[0].outside + costs[0].scoring(text.tokens)
    total = sum(cost.total() for cost in costs) + (len(others) - 1) * again
    host = default_memory() if memory is None else memory
    room = replace(room_for("auto", placement.device), host=host)
    held_bytes = text.tokens * sizes * DTYPE.itemsize
    plan = _plan(text, models, total)
    if not placement.is_host:
        most = device_bytes(
            models,
            min(held_bytes, room.device),
            max((tuple(batch["input_ids"].shape) for batch in batches), key=math.prod),
            text.tokens,
            LogitSizes(),
        )
        plan += f"; at most about {size(most)} of memory on {placement.device}"
    say(plan, show_progress)
    inputs = [
        batch for batch, which in zip(text.samples.batches, text.chosen, strict=True) if which.any()
    ]
    masks = [which for which in text.chosen if which.any()]
    with (
        HiddenStates(room, held_bytes) as held,
        progress("evaluating", total, show_progress, unit="work") as advance,
    ):
        ends = first.run(batches, held, costs[0], advance)
        for model, cost, (_, notes), name in zip(
            others, costs[1:], opened[1:], quantized, strict=True
        ):
            about = {
                "base": str(base),
                "quantized": str(name),
                "notes": (text.samples.description, *opened[0][1], *notes),
            }

            def result(
                scores: list[Scores], samples: int, about: Any = about, since: float = started
            ) -> Evaluation:
                seconds = time.perf_counter() - since
                about = {**about, "notes": (*about["notes"], *limit.notes)}
                return Evaluation(
                    samples=samples, seconds=seconds, **about, **asdict(summarize(scores))
                )

            with held.beside() as beside:
                pair = (ends, model.run(batches, beside, cost, advance))
                scores = _scored((first, model), pair, text, (costs[0], cost), advance, result)
            found = result(scores, text.rows)
            yield Scored(first, model, found, inputs, masks, scores)
            started = time.perf_counter()


def _plan(text: HeldOut, models: list[LayerwiseModel], total: float) -> str:
    """Return one line on the amount of work and its estimated time."""
    layers = [len(model.sequence.layers) for model in models]
    batches = len(text.samples.batches)
    steps = batches * (sum(layers) + 3)
    about = duration(estimate_seconds(total, steps, models[0].hidden_size))
    each = "each model" if len(models) == 2 else f"each of {len(models)} models"
    return (
        f"evaluating {text.to_score:,} tokens of {text.samples.num_samples:,} samples, in "
        f"{batches:,} batches through {layers[0]} layers of {each}: about {about}"
    )


def _scored(
    models: tuple[LayerwiseModel, LayerwiseModel],
    ends: tuple[list[Batch], list[Batch]],
    text: HeldOut,
    costs: tuple[Costs, Costs],
    advance: Callable[[float, str], None],
    result: Callable[[list[Scores], int], Evaluation],
) -> list[Scores]:
    """Score all batches; on Ctrl-C, raise with the result so far."""
    scores: list[Scores] = []
    scored, sizes = 0, LogitSizes()
    try:
        with models[0].head(), models[1].head():
            advance(sum(cost.outside for cost in costs), "both models, scoring")
            for *pair, which in zip(*ends, text.chosen, strict=True):
                input_ids = pair[0].inputs["input_ids"]
                scores += _batch_scores(models, pair, which, sizes)
                scored += len(input_ids)
                work = sum(cost.scoring(input_ids.numel()) for cost in costs)
                advance(work, "both models, scoring")
    except KeyboardInterrupt as interrupt:
        if not scores:
            raise
        raise EvaluationInterrupted(result(scores, scored), text.to_score) from interrupt
    return scores


def _batch_scores(
    models: Sequence[LayerwiseModel], pair: list[Batch], chosen: torch.Tensor, sizes: LogitSizes
) -> list[Scores]:
    """Return the scores of a batch, sample by sample; none if no token of it is scored."""
    while True:
        try:
            parts = list(_scores(models, pair, chosen, sizes))
            break
        except torch.OutOfMemoryError as error:
            shape = (*pair[0].inputs["input_ids"].shape, models[0].vocab_size)
            sizes.halve(shape, error, models[0].limit.notes)
    if not parts:
        return []
    numbers = torch.arange(chosen.numel()).view(chosen.shape)
    step = sizes.positions(models[0].vocab_size, len(chosen))
    each = zip(torch.split(numbers, step, 1), torch.split(chosen, step, 1), strict=True)
    order = torch.cat([some[which] for some, which in each])
    return [Scores.joined(parts).ordered(order.argsort())]


@torch.no_grad()
def _scores(
    models: Sequence[LayerwiseModel], pair: list[Batch], chosen: torch.Tensor, sizes: LogitSizes
) -> Iterator[Scores]:
    """Compare the two models on one batch, a few positions at a time.

    chosen: which next tokens to score, (batch, seq - 1) bool
    """
    input_ids = pair[0].inputs["input_ids"]
    rows, length = input_ids.shape
    vocab_size = models[0].vocab_size
    step = sizes.positions(vocab_size, rows)
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
        some = max(1, sizes.scored // vocab_size)
        for first in range(0, len(targets), some):
            part = slice(first, first + some)
            yield score(logits[0][part], logits[1][part], targets[part])
