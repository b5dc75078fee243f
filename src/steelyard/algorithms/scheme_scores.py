"""What each scheme would cost each module: the KL divergence that its rounding adds, to 2nd order.

For small changes d of a module's output, the divergence of a model from itself grows by
1/2 d^T F d, where F = E[g g^T] and g is the gradient of the log-likelihood of labels that the model
itself draws (the Fisher information). So the score of a scheme is 1/2 E (g . (y_scheme - y))^2, the
mean over tokens. One backward pass gives g for all modules and serves all schemes. Tokens and
modules are taken as independent of each other.

Layers run in reverse, one in memory at a time (`model.layer_gradients`). A probe at the output of
each module computes the scores where autograd would compute a gradient of the probe.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch.nn import Module, Parameter

from steelyard.algorithms.as_stored import Rounding, rounded_inputs
from steelyard.algorithms.model_pair import positions_at_once
from steelyard.algorithms.rounding_ahead import RoundingAhead, Schemes
from steelyard.distributed import ThreadPool
from steelyard.model.activations import HiddenStates, Room
from steelyard.model.layer_gradients import LayerGradients, Trace, Wanted
from steelyard.model.layerwise import DTYPE, LayerwiseModel, default_memory

__all__ = ["gradient_scores", "input_rounding"]


def gradient_scores(
    model: LayerwiseModel,
    rows: Sequence[Mapping[str, torch.Tensor]],
    schemes: Schemes,
    pool: ThreadPool,
    advance: Callable[[float], None],
    rounding: RoundingAhead | None = None,
) -> dict[str, torch.Tensor]:
    """Return the scores of each module, (schemes,) in nats per token; without modules not called.

    rows:     samples of (1, tokens)
    rounding: of the weights, with the same schemes; to nearest by default
    advance:  called with the fraction of the work, a third of it for the forward pass
    """
    samples = [Trace(row) for row in rows]
    tokens = sum(sample.tokens for sample in samples)
    nbytes = tokens * model.hidden_size * DTYPE.itemsize * len(model.sequence)
    plain = LayerGradients(model, pool)
    rounding = RoundingAhead(model, schemes) if rounding is None else rounding
    probing = LayerGradients(model, pool, _Probes(rounding, samples, pool).attached)
    with HiddenStates(Room(0, default_memory() // 2), nbytes) as held:
        plain.forward(samples, held, True, lambda share: advance(share / 3))
        for sample in samples:
            plain.require_gradients(sample)
        step = positions_at_once(model)
        with plain.head():
            calls = [
                functools.partial(
                    plain.through_head, sample, (), functools.partial(_likelihood, number), step
                )
                for number, sample in enumerate(samples)
            ]
            seeds = [found for _, found, _ in pool.do(enumerate(calls))]
        sums = probing.backward(samples, seeds, lambda share: advance(2 * share / 3))
    return {name: each / (2 * tokens) for name, each in sums.items()}


def _likelihood(number: int, logits: torch.Tensor, positions: slice) -> torch.Tensor:
    """Return the log-likelihood of labels drawn from the logits, summed over positions.

    number: of the sample; each sample and position draws its own labels, whatever the thread
    """
    log_p = logits[0].log_softmax(-1)  # (positions, vocabulary)
    drawn = torch.Generator().manual_seed((number << 32) + positions.start)
    labels = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=drawn)
    return log_p.gather(-1, labels.to(log_p.device)).sum()


def input_rounding(scheme: QuantizationScheme | None, x: torch.Tensor) -> Rounding | None:
    """Return a function that rounds inputs under a scheme; None if that leaves them as they are.

    x: (tokens, channels); a static scale is that of these tokens
    """
    if scheme is None or scheme.input_activations is None:
        return None
    holder: Any = Module()
    holder.quantization_scheme = scheme
    return rounded_inputs(holder, x)


class _Probes:
    """Adds a probe to each module of a layer."""

    def __init__(self, rounding: RoundingAhead, samples: Sequence[Trace], pool: ThreadPool) -> None:
        self.rounding = rounding
        self.samples = samples
        self.pool = pool

    @contextlib.contextmanager
    def attached(self, root: Module, without: Sequence[Module]) -> Iterator[list[Wanted]]:
        """Attach probes to the modules of a layer, and yield them."""
        names, schemes = self.rounding.names, self.rounding.schemes
        modules: dict[str, Any] = {names[m]: m for m in root.modules() if m in names}
        if len(without) or not modules:  # the modules after the layers have none
            yield []
            return
        rounded = self.rounding.of_layer(root, self.samples, self.pool)
        errors = {n: [w - modules[n].weight.data for w in each] for n, each in rounded.items()}
        wanted, handles = [], []
        try:
            for name, module in modules.items():
                probe = Parameter(torch.zeros(len(errors[name]), dtype=torch.float64))
                wanted.append(Wanted(name, probe, lambda scores: scores))
                hook = functools.partial(_attach, probe, errors[name], schemes[name])
                handles.append(module.register_forward_hook(hook))
            yield wanted
        finally:
            for handle in handles:
                handle.remove()


def _attach(
    probe: Parameter,
    errors: Sequence[torch.Tensor],
    schemes: Sequence[QuantizationScheme],
    module: Any,
    args: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    with torch.no_grad():
        x = args[0].detach().reshape(-1, args[0].shape[-1])

    def scores(gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens of (g . (y_scheme - y))^2 for each scheme."""
        g = gradient.reshape(-1, gradient.shape[-1])
        found = []
        for error, scheme in zip(errors, schemes, strict=True):
            rounding = input_rounding(scheme, x) if len(x) else None
            back = g @ error  # (tokens, in)
            if rounding is None:
                change = (back * x).sum(-1)
            else:
                seen = rounding(x)
                change = (back * seen).sum(-1) + ((g @ module.weight) * (seen - x)).sum(-1)
            found.append(change.double().square().sum())
        return torch.stack(found).cpu()

    watched: torch.Tensor = _Watched.apply(output, probe, scores)  # type: ignore[no-untyped-call]
    return watched


class _Watched(torch.autograd.Function):
    """The value itself; its gradient also gives the scores, as the gradient of the probe."""

    @staticmethod
    def forward(
        context: Any, value: torch.Tensor, probe: torch.Tensor, scores: Callable[..., Any]
    ) -> torch.Tensor:
        context.scores = scores
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        with torch.no_grad():
            return gradients[0], context.scores(gradients[0]), None
