"""The original and the quantized model, layer by layer: their KL divergence and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from steelyard.algorithms.finished_checkpoint import FinishedCheckpoint
from steelyard.algorithms.tunables import Tunables
from steelyard.model.activations import HiddenStates, Room
from steelyard.model.blocks import Batch
from steelyard.model.layer_gradients import Gradients, LayerGradients, Trace, summed
from steelyard.model.layerwise import DTYPE, LayerwiseModel, default_memory
from steelyard.model.opening import open_model

__all__ = ["REVERSE", "ModelPair", "SamplePair", "divergence", "positions_at_once"]

REVERSE = 3.0  # cost of a layer in reverse, relative to forward
_PROJECTED = 1 << 22  # logits of one model and thread computed at a time

Advance = Callable[..., None]


@dataclass(frozen=True)
class SamplePair:
    """One sample in the original and in the quantized model."""

    base: Trace
    quantized: Trace


class ModelPair:
    """The original and the quantized model, layer by layer."""

    def __init__(
        self, finished: FinishedCheckpoint, targets: Sequence[str], ignore: Sequence[str]
    ) -> None:
        def opened(folder: Path, role: str) -> LayerwiseModel:
            return LayerwiseModel(open_model(folder, finished.trust_remote_code)[0], role)

        quantized = opened(finished.folder, "quantized")
        self.tunables = Tunables(quantized.source, targets, ignore)
        self.pool = finished.pool
        self.base = LayerGradients(opened(finished.base, "base"), self.pool)
        self.quantized = LayerGradients(quantized, self.pool, self.tunables.applied)

    def start(self, pairs: Sequence[SamplePair], held: HiddenStates, advance: Advance) -> None:
        """Run the original, and record the calls of the quantized model."""
        self.base.forward([each.base for each in pairs], held, False, _times(advance, len(pairs)))
        quantized = [each.quantized for each in pairs]
        with self._held(quantized, 1) as own:
            self.quantized.forward(quantized, own, False, _times(advance, len(pairs)))
            for sample in quantized:
                self.quantized.require_gradients(sample)
                sample.outputs.clear()

    def divergences(self, pairs: Sequence[SamplePair], advance: Advance) -> list[float]:
        """Return KL(original || quantized) of each sample, the mean over its tokens."""
        quantized = [each.quantized for each in pairs]
        with self._held(quantized, 1) as held:
            self.quantized.forward(quantized, held, False, _times(advance, len(pairs)))
            with self.base.head(), self.quantized.head():
                calls = [
                    functools.partial(
                        divergence, self.base.model, each.base, self.quantized.model, each.quantized
                    )
                    for each in pairs
                ]
                return self.pool.do(enumerate(calls))

    def gradients(self, pairs: Sequence[SamplePair], advance: Advance) -> Gradients:
        """Return the gradients of the mean divergence over all tokens of some samples."""
        quantized = [each.quantized for each in pairs]
        tokens = sum(each.base.tokens for each in pairs)
        found: Gradients = {}
        with self._held(quantized, len(self.quantized.model.sequence)) as held:
            self.quantized.forward(quantized, held, True, _times(advance, len(pairs)))
            with self.base.head(), self.quantized.head() as wanted:
                calls = [
                    functools.partial(
                        self.quantized.through_head,
                        each.quantized,
                        wanted,
                        functools.partial(self._loss, each.base, tokens),
                        positions_at_once(self.base.model),
                    )
                    for each in pairs
                ]
                ends = self.pool.do(enumerate(calls))
            for _, _, of_head in ends:
                summed(found, of_head)
            seeds = [seed for _, seed, _ in ends]
            work = _times(advance, REVERSE * len(pairs))
            summed(found, self.quantized.backward(quantized, seeds, work))
            for sample in quantized:
                sample.outputs.clear()
        return found

    def _loss(
        self, base: Trace, tokens: int, logits: torch.Tensor, positions: slice
    ) -> torch.Tensor:
        with torch.no_grad():
            log_p = self.base.model.logits(Batch(base.inputs, base.outputs), positions)
            log_p = log_p.log_softmax(-1)
        return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum() / tokens

    def _held(self, samples: Sequence[Trace], layers: int) -> HiddenStates:
        tokens = sum(sample.tokens for sample in samples)
        nbytes = tokens * self.base.model.hidden_size * DTYPE.itemsize * layers
        return HiddenStates(Room(0, default_memory() // 2), nbytes)


def positions_at_once(model: LayerwiseModel) -> int:
    """Return the number of positions whose logits are computed at a time."""
    return max(1, _PROJECTED // model.vocab_size)


@torch.no_grad()
def divergence(
    base: LayerwiseModel, sample: Trace, quantized: LayerwiseModel, changed: Trace
) -> float:
    """Return KL(base || quantized) of a sample, the mean over its tokens; enter both heads first.

    sample, changed: after the layers of the two models
    """
    total, step = 0.0, positions_at_once(base)
    for start in range(0, sample.tokens, step):
        positions = slice(start, min(start + step, sample.tokens))
        log_p, log_q = (
            model.logits(Batch(each.inputs, each.outputs), positions).double().log_softmax(-1)
            for model, each in ((base, sample), (quantized, changed))
        )
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / sample.tokens


def _times(advance: Advance, amount: float) -> Callable[[float], None]:
    return lambda share: advance(share * amount)
