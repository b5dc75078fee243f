"""Where a quantized model loses: output errors of modules and blocks, and what blocks would gain.

A few samples are enough, since errors are ratios and gains are differences on the same tokens. Of a
model with towers, or whose layers share state, only modules are compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from steelyard.engine.progress import progress
from steelyard.evaluate.block_gains import Variants, copied
from steelyard.evaluate.comparable import check_pair
from steelyard.evaluate.larger_scheme import larger_scheme
from steelyard.evaluate.metrics import score
from steelyard.evaluate.output_errors import ErrorSum, OutputErrors
from steelyard.evaluate.standard_error import mean_and_error
from steelyard.formats.descriptions import scheme_label
from steelyard.model.activations import HiddenStates, fetched, room_for
from steelyard.model.blocks import Batch
from steelyard.model.cost import Costs
from steelyard.model.layerwise import LayerwiseModel
from steelyard.model.placeholders import first_tensor

__all__ = ["BlockCost", "Diagnosis", "diagnose"]

_TOKENS = 1024  # at most, unless the first sample alone is longer
_PROJECTED = 1 << 24


@dataclass(frozen=True)
class BlockCost:
    """One block of the quantized model.

    error:      squared error of its output on the original's input, over the square of what the
                original adds to that input
    gain:       KL divergence less, in nats per token, if it alone had the larger scheme
    gain_error: standard error of the gain
    schemes:    of its modules now
    larger:     the larger schemes, such as W8A16; 16 bit for none
    """

    name: str
    error: float | None
    gain: float | None
    gain_error: float | None
    schemes: list[str]
    larger: list[str]


@dataclass(frozen=True)
class Diagnosis:
    """Errors and gains on a few samples.

    modules: output error of each quantized module
    """

    tokens: int
    kl_divergence: float
    modules: dict[str, float] = field(default_factory=dict)
    blocks: list[BlockCost] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_of(batches: Sequence[Any], most: int = _TOKENS) -> list[Any]:
    """Return the first batches, up to a number of tokens; at least one."""
    chosen: list[Any] = []
    tokens = 0
    for batch in batches:
        tokens += batch["input_ids"].numel()
        if chosen and tokens > most:
            break
        chosen.append(batch)
    return chosen


def diagnose(
    base: LayerwiseModel,
    quantized: LayerwiseModel,
    batches: Sequence[Any],
    show_progress: bool | None = None,
) -> Diagnosis:
    """Compare two models module by module and block by block.

    batches: samples without padding
    """
    check_pair(base, quantized)
    models = (base, quantized)
    layers = len(base.sequence)
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    costs = [Costs(each.source.model, each.sequence.modules, tokens) for each in models]
    total = sum(cost.total() for cost in costs)
    total += sum(costs[1].layer(i, tokens) * (i + 2) for i in range(layers))
    errors = OutputErrors(base.source.model, quantized.source.model)
    blocks = [ErrorSum() for _ in range(layers)]
    with (
        errors.watching(),
        HiddenStates(room_for("auto", base.source.placement.device)) as held,
        progress("finding what blocks cost", total, show_progress, unit="work") as advance,
    ):
        ends = [[Batch(inputs) for inputs in batches] for _ in models]
        for model, each in zip(models, ends, strict=True):
            with model.sequence:
                model.record(each, 0)
        before = [[copied(batch) for batch in each] for each in ends]
        variants = Variants(base, quantized)
        # of towers, later calls are recorded only when their output is known
        whole = all(len(batch.calls) == layers for each in ends for batch in each)
        whole = whole and not any(model.sequence.is_stateful for model in models)
        walks = [
            model.walk(each, held, cost, advance)
            for model, each, cost in zip(models, ends, costs, strict=True)
        ]
        with contextlib.closing(walks[0]) as first, contextlib.closing(walks[1]) as second:
            for index, _ in zip(first, second, strict=True):
                errors.compare()
                if whole:
                    _block_error(index, models, before[0], ends[0], blocks[index])
                    variants.run(index, before[1])
                    before = [[copied(batch) for batch in each] for each in ends]
                work = costs[1].layer(index, tokens) * (index + 2)
                advance(work, f"variants, layer {index + 1} of {layers}")
        with base.head(), quantized.head():
            found = _divergences(models, ends, variants, errors.compare)
    mean, _ = mean_and_error(found[None])
    return Diagnosis(
        tokens=sum(map(len, found[None])),
        kl_divergence=mean,
        modules={n: e for n, each in errors.found.items() if (e := each.relative) is not None},
        blocks=[_cost(quantized, index, blocks[index], found) for index in range(layers)],
    )


@torch.no_grad()
def _block_error(
    index: int,
    models: tuple[LayerwiseModel, LayerwiseModel],
    before: list[Batch],
    after: list[Batch],
    total: ErrorSum,
) -> None:
    """Run the quantized layer on the original's inputs, and add its error."""
    sequence = models[1].sequence
    for start, end in zip(before, after, strict=True):
        if index in start.calls:
            found = first_tensor(sequence.run(index, start))
            wanted = fetched(first_tensor(end.outputs[index]))
            hidden = models[0].sequence.input(index, start)
            total.add(found, wanted, wanted - hidden if hidden.shape == wanted.shape else wanted)


@torch.no_grad()
def _divergences(
    models: tuple[LayerwiseModel, LayerwiseModel],
    ends: list[list[Batch]],
    variants: Variants,
    compare: Callable[[], None],
) -> dict[int | None, list[torch.Tensor]]:
    """Return the KL divergence of each token: of the quantized model (None) and of each variant."""
    base, quantized = models
    step = max(1, _PROJECTED // base.vocab_size)
    runs: dict[int | None, list[Batch]] = {None: ends[1]}
    runs |= {each.index: each.batches for each in variants.all}
    found: dict[int | None, list[torch.Tensor]] = {key: [] for key in runs}
    for number, batch in enumerate(ends[0]):
        length = batch.inputs["input_ids"].shape[1]
        parts: dict[int | None, list[torch.Tensor]] = {key: [] for key in runs}
        for start in range(0, length - 1, step):
            positions = slice(start, min(start + step, length - 1))
            targets = batch.inputs["input_ids"][:, start + 1 : positions.stop + 1].flatten()
            wanted = base.logits(batch, positions).flatten(0, 1)
            compare()
            for key, each in runs.items():
                logits = quantized.logits(each[number], positions).flatten(0, 1)
                parts[key].append(score(wanted, logits, targets).divergence)
        for key, some in parts.items():
            found[key] += [torch.cat(some)] if some else []
    return found


def _cost(
    quantized: LayerwiseModel,
    index: int,
    error: ErrorSum,
    found: dict[int | None, list[torch.Tensor]],
) -> BlockCost:
    layer = quantized.sequence.layers[index]
    schemes: Any = [
        scheme
        for module in layer.module.modules()
        if (scheme := getattr(module, "quantization_scheme", None)) is not None
        and "weight" in module._parameters
    ]
    larger = (larger_scheme(scheme) for scheme in schemes)
    gain, spread = None, None
    if index in found:
        pairs = zip(found[None], found[index], strict=True)
        gain, error_of_gain = mean_and_error([now - then for now, then in pairs])
        spread = error_of_gain if math.isfinite(error_of_gain) else None
    return BlockCost(
        name=layer.name,
        error=error.relative,
        gain=gain,
        gain_error=spread,
        schemes=list(dict.fromkeys(map(scheme_label, schemes))),
        larger=list(dict.fromkeys("16 bit" if s is None else scheme_label(s) for s in larger)),
    )
