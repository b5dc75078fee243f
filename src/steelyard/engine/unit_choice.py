"""Chooses the schemes of the units of a bit budget: scores, the exact choice, and measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from compressed_tensors.quantization import QuantizationScheme

from steelyard.algorithms import Algorithm
from steelyard.algorithms.assigned_schemes import AssignedSchemes
from steelyard.algorithms.bit_budget import (
    KINDS,
    MEASUREMENTS,
    SWAPS,
    Measured,
    by_kind,
    fewest_bits,
    least_loss,
    measured_best,
)
from steelyard.algorithms.rounding_ahead import RoundingAhead, Schemes
from steelyard.algorithms.scheme_scores import gradient_scores
from steelyard.data.samples import Samples
from steelyard.data.token_rows import token_rows
from steelyard.distributed import ThreadPool
from steelyard.engine.progress import progress
from steelyard.engine.weight_losses import weight_losses
from steelyard.errors import DataError, PipelineError, PlanError
from steelyard.model.layerwise import LayerwiseModel
from steelyard.model.source import Source
from steelyard.modifiers.bit_budget import UNQUANTIZED, BitBudgetModifier
from steelyard.plan.budget_units import BudgetUnit, needs_cuda
from steelyard.words import count

__all__ = ["UnitChoice"]

SCORED, HELD_OUT = 1 << 14, 1 << 13  # tokens at most
FEWEST = 2  # samples: one to score, one to hold out
EVERY = 8  # one of so many samples is held out

Row = Mapping[str, torch.Tensor]
Chosen = list[tuple[BudgetUnit, QuantizationScheme | None]]


class UnitChoice:
    """One choice.

    algorithms: of the recipe without the budget; one of them quantizes
    show:       whether to show the progress, as `engine.progress` has it
    """

    def __init__(
        self,
        source: Source,
        units: Sequence[BudgetUnit],
        budget: BitBudgetModifier,
        algorithms: Sequence[Algorithm],
        show: bool | None,
    ) -> None:
        self.source = source
        self.algorithms = algorithms
        self.units = list(units)
        self.budget = budget
        self.show = show
        self.lines: list[str] = []

    def choose(self, samples: Samples | None) -> tuple[Chosen, list[str]]:
        """Return the scheme of each unit, and lines that say how it was chosen."""
        if self.budget.bits is not None:
            self._check_bits(self.budget.bits)
        if samples is not None:
            options = self._by_data(samples)
        elif self.budget.max_kl is not None:
            raise DataError(
                "BitBudgetModifier needs calibration data to measure max_kl: pass dataset=, or "
                "give bits instead"
            )
        else:
            options = least_loss(
                self._costs(), weight_losses(self.source, self.units, self.show), self._limit()
            )
            self.lines.append("chosen by the errors of weights alone, since there is no data")
        chosen = [(unit, unit.schemes[k]) for unit, k in zip(self.units, options, strict=True)]
        if all(scheme is None for _, scheme in chosen):
            raise PlanError(
                "BitBudgetModifier leaves every module unquantized: allow more KL divergence, or "
                "fewer bits"
            )
        return chosen, [self._summary(options), *self.lines, *self._served(options)]

    # -- the budget ---------------------------------------------------------------------------

    def _costs(self) -> list[list[int]]:
        return [unit.costs for unit in self.units]

    @property
    def _weights(self) -> int:
        return sum(unit.weights for unit in self.units)

    def _limit(self) -> int:
        assert self.budget.bits is not None
        return int(self.budget.bits * self._weights)

    def _check_bits(self, bits: float) -> None:
        costs = self._costs()
        least, most = (sum(map(end, costs)) / self._weights for end in (min, max))
        if bits < least:
            raise PlanError(
                f"{bits:g} bits per weight are fewer than the {least:g} of the smallest schemes: "
                "allow more bits, or start from a scheme with fewer, such as num_bits: 3"
            )
        quantized = all(UNQUANTIZED not in unit.widths for unit in self.units)
        if bits > most or (bits == most and not quantized):
            remedy = "ask for fewer" if not quantized else "ask for fewer, or allow bit_widths 16"
            raise PlanError(
                f"{bits:g} bits per weight leave nothing to choose: the largest schemes take "
                f"{most:g}; {remedy}"
            )

    # -- with data ----------------------------------------------------------------------------

    def _by_data(self, samples: Samples) -> list[int]:
        rows = token_rows(samples, "BitBudgetModifier")
        if len(rows) < FEWEST:
            raise DataError(
                f"BitBudgetModifier needs {FEWEST} samples of two tokens or more, since it holds "
                f"some out; there are {len(rows)}. Pass more data"
            )
        every = max(min(EVERY, len(rows) // 2), 2)
        bring = self.source.placement.bring_all
        held_out = [bring(row) for row in _first(rows[every - 1 :: every], HELD_OUT)]
        others = [row for i, row in enumerate(rows) if i % every != every - 1]
        scored = [bring(row) for row in _first(others, SCORED)]
        model = LayerwiseModel(self.source, "base")
        pool = ThreadPool.on(self.source.placement.device)
        kinds = min(len({unit.kind for unit in self.units}), KINDS)
        passes = kinds + (MEASUREMENTS if self.budget.bits is None else 2 + SWAPS)
        total = 3 * _tokens(scored) + (1 + passes) * _tokens(held_out)
        schemes = {
            name: [scheme for scheme in unit.schemes if scheme is not None]
            for unit in self.units
            for name in unit.names
        }
        with (
            pool,
            progress("choosing schemes", total, self.show, unit="work") as advance,
            self._rounding(model, schemes) as rounding,
            AssignedSchemes(model, held_out, pool, rounding) as assigned,
        ):
            work = _times(advance, 3 * _tokens(scored))
            losses = self._scores(model, scored, pool, work, rounding)
            step = _times(advance, _tokens(held_out))
            if not rounding.can_measure:
                return self._predicted(losses)
            assigned.start(step)

            def measure(options: Sequence[int]) -> list[float]:
                schemes = {
                    name: unit.schemes[k]
                    for unit, k in zip(self.units, options, strict=True)
                    for name in unit.names
                }
                return assigned.divergences(schemes, step)

            kinds_of = [unit.kind for unit in self.units]
            best, uniform = self._best(by_kind(losses, kinds_of, measure), measure)
        compared = ""
        if uniform is not None:
            alike = f"{self.units[0].widths[uniform.options[0]]} bits"
            compared = f", {uniform.kl:.4g} with {alike} in all units"
        rounded = "as GPTQ rounds them without drift correction"
        rounded = rounded if rounding.by_hessians else "rounded to nearest"
        self.lines.append(
            f"KL divergence {best.kl:.4g}{compared}: on "
            f"{count(len(held_out), 'held-out sample')}, with weights {rounded}"
        )
        return best.options

    def _rounding(self, model: LayerwiseModel, schemes: Schemes) -> RoundingAhead:
        quantizing = (a for a in self.algorithms if a.modifier.quantization_config() is not None)
        weighs = any(a.needs.importance for a in self.algorithms)
        return RoundingAhead(model, schemes, next(quantizing), weighs)

    def _predicted(self, losses: Sequence[Sequence[float]]) -> list[int]:
        """Choose by predicted losses alone."""
        if self.budget.max_kl is not None:
            raise PlanError(
                "max_kl needs the rounded weights of all bit_widths, for which TMPDIR has no room: "
                "set TMPDIR to a larger disk, or give bits instead"
            )
        options = least_loss(self._costs(), losses, self._limit())
        kl = sum(each[k] for each, k in zip(losses, options, strict=True))
        self.lines.append(
            f"predicted KL divergence {kl:.4g}; not measured, since TMPDIR has no room for the "
            "rounded weights of all bit_widths"
        )
        return options

    def _scores(
        self,
        model: LayerwiseModel,
        rows: Sequence[Row],
        pool: ThreadPool,
        advance: Callable[[float], None],
        rounding: RoundingAhead,
    ) -> list[list[float]]:
        """Return the losses of each unit; units that no token reaches leave the budget."""
        try:
            scores = gradient_scores(model, rows, rounding.schemes, pool, advance, rounding)
        except PipelineError as error:
            raise PipelineError(
                f"{error}. Leave out the data, and BitBudgetModifier judges by weights alone"
            ) from error
        reached = [unit for unit in self.units if any(name in scores for name in unit.names)]
        if missed := [unit for unit in self.units if unit not in reached]:
            self.lines.append(
                f"{count(len(missed), 'unit')} such as {missed[0].names[0]} saw no token and kept "
                "the scheme of the recipe"
            )
        if not reached:
            raise DataError("no token reached a module of the bit budget: pass other data")
        self.units = reached
        found = []
        for unit in reached:
            total = sum((scores[name] for name in unit.names if name in scores), torch.zeros(()))
            known = iter(total.tolist())
            found.append([0.0 if scheme is None else next(known) for scheme in unit.schemes])
        return found

    def _best(
        self, losses: Sequence[Sequence[float]], measure: Callable[[list[int]], list[float]]
    ) -> tuple[Measured, Measured | None]:
        costs = self._costs()
        if self.budget.max_kl is None:
            return measured_best(costs, losses, self._limit(), measure)
        found = fewest_bits(costs, losses, self._weights, self.budget.max_kl, measure)
        if found is None:
            raise PlanError(
                f"no choice has a KL divergence of {self.budget.max_kl:g} or less: allow more, or "
                "wider bit_widths"
            )
        return found, None

    # -- words --------------------------------------------------------------------------------

    def _summary(self, options: Sequence[int]) -> str:
        picked = list(zip(self.units, options, strict=True))
        codes = sum(unit.costs[k] for unit, k in picked) / self._weights
        stored = sum(unit.stored_bits(k) for unit, k in picked) / self._weights
        numbers = Counter(unit.widths[k] for unit, k in picked)
        parts = [
            f"{number} unquantized" if bits == UNQUANTIZED else f"{number} with {bits} bits"
            for bits, number in sorted(numbers.items())
        ]
        return (
            f"bit budget: {codes:.4g} bits per weight, {stored:.4g} with scales; of "
            f"{count(len(picked), 'unit')} {', '.join(parts)}"
        )

    def _served(self, options: Sequence[int]) -> list[str]:
        """Return what a server needs, if that is more than the scheme of the recipe needs."""
        used = {unit.widths[k] for unit, k in zip(self.units, options, strict=True)}
        if not (widths := needs_cuda(used)):
            return []
        return [
            f"vLLM serves {' and '.join(map(str, widths))} bits on CUDA alone; bit_widths 4, 8, 16 "
            "keeps to widths that it serves everywhere"
        ]


def _first(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Return the first rows, within a number of tokens; two at least."""
    found: list[Row] = []
    for row in rows:
        if len(found) >= 2 and _tokens([*found, row]) > tokens:
            break
        found.append(row)
    return found


def _tokens(rows: Sequence[Row]) -> int:
    return sum(row["input_ids"].numel() for row in rows)


def _times(advance: Callable[[float], None], amount: float) -> Callable[[float], None]:
    return lambda share: advance(share * amount)
