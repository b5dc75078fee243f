"""Tunes scales, norm gains and biases of a quantized model by KL divergence to the original.

It runs when the checkpoint is complete. The original runs once, and its last hidden states are
kept. Each step runs a few samples through the quantized model layer by layer, compares the two
distributions over the next token, and walks the layers in reverse for gradients (`model_pair`).
Adam moves the relative changes of all tensors (`tunables`); codes are frozen.

Every eighth sample is held out. After each epoch the divergence is measured there, with values as
they would be stored: the best epoch is kept, and tuning ends when an epoch is no better. The start
is kept if the best epoch won no more than two standard errors of the paired differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steelyard.algorithms.algorithm import Algorithm, Needs
from steelyard.algorithms.finished_checkpoint import FinishedCheckpoint
from steelyard.algorithms.guard import Guard
from steelyard.algorithms.model_pair import REVERSE, ModelPair, SamplePair
from steelyard.algorithms.tunables import MOST, Tunable
from steelyard.data.samples import Samples
from steelyard.data.token_rows import token_rows
from steelyard.errors import DataError, NonFiniteError
from steelyard.model.activations import HiddenStates, Room
from steelyard.model.layer_gradients import Trace
from steelyard.model.layerwise import DTYPE, default_memory
from steelyard.modifiers.tuning import TuningModifier
from steelyard.words import count

__all__ = ["Tuning"]

EVERY = 8  # one of so many samples is held out
FEWEST = 2 * EVERY  # samples: a standard error takes two held-out ones
_DECAY = (0.9, 0.99)  # of Adam's two averages


@Algorithm.register("tuning")
class Tuning(Algorithm):
    """Changes stored tensors of the complete checkpoint, or none."""

    rounds_to_nearest = False
    mergeable = True  # it gathers no statistics
    modifier: TuningModifier

    @property
    def needs(self) -> Needs:
        return Needs(samples=True)

    @property
    def finishing_passes(self) -> float:
        return 2 + self.modifier.epochs * (1 + REVERSE)

    def check_samples(self, samples: Samples) -> None:
        found = token_rows(samples, "TuningModifier")
        if len(found) < FEWEST:
            raise DataError(
                f"TuningModifier needs {FEWEST} samples of two tokens or more, since it holds out "
                f"every {EVERY}th; there are {len(found)}. Pass more data, or remove it"
            )

    def finish(self, finished: FinishedCheckpoint) -> dict[str, torch.Tensor]:
        rows = token_rows(finished.samples, "TuningModifier")
        pair = ModelPair(finished, self.modifier.targets, self.modifier.ignore)
        tunables = list(pair.tunables)
        for reason, names in pair.tunables.fixed.items():
            finished.notes.append(
                f"TuningModifier leaves the scales of {count(len(names), 'module')} such as "
                f"{names[0]} as they are: {reason}"
            )
        samples = [SamplePair(Trace(row), Trace(row)) for row in rows]
        held_out = samples[EVERY - 1 :: EVERY]
        trained = [pair for i, pair in enumerate(samples) if i % EVERY != EVERY - 1]
        epochs = self.modifier.epochs
        total = (
            2 * len(samples)
            + len(held_out)
            + epochs * (len(held_out) + (1 + REVERSE) * len(trained))
        )
        memory = default_memory() // 2
        tokens = sum(each.base.tokens for each in samples)
        nbytes = tokens * pair.base.model.hidden_size * DTYPE.itemsize
        with (
            finished.pool,
            HiddenStates(Room(0, memory), nbytes) as held,
            finished.progress("tuning", total, unit="work") as advance,
        ):
            pair.start(samples, held, advance)
            guard = Guard(tunables, pair.divergences(held_out, advance))
            adam = Adam(tunables)
            size = self.modifier.batch_size
            steps = epochs * -(-len(trained) // size)
            done = 0
            try:
                for epoch in range(epochs):
                    order = torch.Generator().manual_seed(epoch)
                    shuffled = torch.randperm(len(trained), generator=order).tolist()
                    for first in range(0, len(trained), size):
                        chosen = [trained[i] for i in shuffled[first : first + size]]
                        gradients = pair.gradients(chosen, advance)
                        adam.step(gradients, self.modifier.lr * (1 - done / steps))
                        done += 1
                    if not guard.better(pair.divergences(held_out, advance)):
                        break
            except NonFiniteError as error:
                finished.notes.append(f"TuningModifier ended early: {error}")
        finished.notes.append(guard.summary())
        return guard.best()


class Adam:
    """Adam on the changes of all tensors."""

    def __init__(self, tunables: Sequence[Tunable]) -> None:
        self.tunables = {each.key: each for each in tunables}
        self.steps = 0
        self._averages = {
            each.key: (torch.zeros_like(each.start), torch.zeros_like(each.start))
            for each in tunables
        }

    def step(self, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        """Move each change against its gradient, by about `rate`."""
        self.steps += 1
        slow, slower = _DECAY
        for key, gradient in gradients.items():
            first, second = self._averages[key]
            first.lerp_(gradient, 1 - slow)
            second.lerp_(gradient.square(), 1 - slower)
            size = second.div(1 - slower**self.steps).sqrt_()
            moved = first.div(1 - slow**self.steps).div_(size.clamp_min_(1e-30))
            self.tunables[key].change.sub_(moved, alpha=rate).clamp_(-MOST, MOST)
