"""Ship, look, or do not ship: what an evaluation says of a checkpoint.

Each measure has two limits. Below the first it says ship, above the second do not ship, between
them look. A measure counts as below or above a limit only if its interval, two standard errors on
either side, is; else too few tokens were evaluated to tell. The worst measure decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from steelyard.errors import OptionError, nearest
from steelyard.evaluate.evaluation import Evaluation
from steelyard.words import number

__all__ = ["WORDS", "Limits", "Measure", "Verdict", "judge"]

SHIP, LOOK, STOP = WORDS = ("ship", "look", "do not ship")
_MOST = 100  # times the tokens evaluated: as many more would be needed where it is on the limit
_TAIL = 400  # tokens from which on the 99th percentile has an upper bound


@dataclass(frozen=True)
class Limits:
    """For each measure, up to where it says ship, and from where on do not ship.

    kl:         mean KL divergence from the original, in nats per token
    p99:        its 99th percentile over tokens, the tail
    perplexity: relative change of the perplexity
    top1:       fraction of tokens for which both models predict the same
    """

    kl: tuple[float, float] = (0.05, 0.2)
    p99: tuple[float, float] = (0.6, 2.5)
    perplexity: tuple[float, float] = (0.03, 0.1)
    top1: tuple[float, float] = (0.9, 0.8)

    @classmethod
    def parse(cls, texts: list[str]) -> Limits:
        """Return limits from texts; a single number is the limit to ship, with its ratio to stop.

        >>> Limits.parse(["kl=0.02:0.1", "top1=0.95"])
        Limits(kl=(0.02, 0.1), p99=(0.6, 2.5), perplexity=(0.03, 0.1), top1=(0.95, 0.9))
        """
        given: dict[str, tuple[float, float]] = {}
        known = [each.name for each in fields(cls)]
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise OptionError(f"there is no measure {name!r}: {nearest(name, known)}")
            ship, _, stop = value.partition(":")
            try:
                first = float(ship)
                second = float(stop) if stop else _scaled(name, first)
            except ValueError:
                raise OptionError(f"{text!r}: write {name}=SHIP or {name}=SHIP:STOP") from None
            falling = name == "top1"
            ordered = first >= second if falling else first <= second
            if not ordered or not (math.isfinite(first) and math.isfinite(second)) or second < 0:
                side = "below" if falling else "above"
                raise OptionError(f"{text!r}: the limit to stop must be {side} the limit to ship")
            given[name] = (first, second)
        return cls(**given)


def _scaled(name: str, ship: float) -> float:
    """Return the limit to stop that is as far from a limit to ship as by default."""
    first, second = map(float, getattr(Limits(), name))
    if name == "top1":
        return round(max(0.0, 1 - (1 - ship) * (1 - second) / (1 - first)), 10)
    return ship * second / first


@dataclass(frozen=True)
class Measure:
    """One measure of an evaluation.

    low, high: its interval; None where it is unbounded
    word:      ship, look, do not ship, or "" if the interval has a limit inside
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    ship: float
    stop: float
    word: str
    tokens_needed: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The word of an evaluation, its reasons, and the measures behind it.

    tokens_needed: to decide all measures; None if those evaluated were enough
    """

    word: str
    reasons: list[str]
    tokens: int
    tokens_needed: int | None
    measures: list[Measure] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def meets(self, word: str) -> bool:
        """Whether the verdict is as good as `word`."""
        return WORDS.index(self.word) <= WORDS.index(word)


def judge(found: Evaluation, limits: Limits | None = None) -> Verdict:
    """Return the verdict on an evaluation."""
    limits = limits or Limits()
    measures = list(_measures(found, limits))
    words = {measure.word for measure in measures}
    needed = [m.tokens_needed for m in measures if m.tokens_needed is not None]
    word = STOP if STOP in words else SHIP if words == {SHIP} else LOOK
    reasons = [_reason(measure) for measure in measures if measure.word == word]
    if word == LOOK:
        reasons += [_reason(measure) for measure in measures if not measure.word]
    tokens_needed = max(needed) if needed and word != STOP else None
    if tokens_needed is not None:
        reasons.append(
            f"{found.tokens:,} tokens are too few to tell: evaluate at least {tokens_needed:,}"
        )
    return Verdict(word, reasons, found.tokens, tokens_needed, measures)


def _measures(found: Evaluation, limits: Limits) -> Iterator[Measure]:
    error = math.inf if found.kl_error is None else found.kl_error
    kl = found.kl_divergence
    yield _measure("kl", (kl, kl - 2 * error, kl + 2 * error), limits.kl, found.tokens)
    tail = (found.kl_p99_low, found.kl_p99_high)
    low, high = (math.inf if each is None else each for each in tail)
    p99 = (found.kl_p99, min(low, found.kl_p99), high)
    yield _measure("p99", p99, limits.p99, found.tokens)
    error = math.inf if found.loss_error is None else found.loss_error
    change = found.perplexity_change
    ends = [_grown(change, sign * 2 * error) for sign in (-1, 1)]
    yield _measure("perplexity", (change, *ends), limits.perplexity, found.tokens)
    error = math.inf if found.top1_error is None else found.top1_error
    top1 = found.top1_agreement
    ends = [max(top1 - 2 * error, 0.0), min(top1 + 2 * error, 1.0)]
    yield _measure("top1", (top1, *ends), limits.top1, found.tokens)


def _grown(change: float, by: float) -> float:
    """Return a relative change of perplexity whose logarithm is larger."""
    try:
        return (1 + change) * math.exp(by) - 1
    except OverflowError:
        return math.inf


def _measure(
    name: str, interval: tuple[float, ...], limits: tuple[float, float], tokens: int
) -> Measure:
    value, low, high = interval
    ship, stop = limits
    best, worst = (high, low) if name == "top1" else (low, high)
    sign = -1 if name == "top1" else 1  # a larger value is worse, or a smaller one
    needed = None
    if math.isnan(value) or sign * best > sign * stop:
        word = STOP
    elif sign * worst <= sign * ship:
        word = SHIP
    elif sign * best > sign * ship and sign * worst <= sign * stop:
        word = LOOK
    else:
        word = ""
        inside = [each for each in limits if sign * best <= sign * each < sign * worst]
        needed = max(_needed(value, best, worst, each, sign, tokens) for each in inside)
    bounds = [each if math.isfinite(each) else None for each in interval]
    return Measure(name, bounds[0], bounds[1], bounds[2], ship, stop, word, needed)


def _needed(value: float, best: float, worst: float, limit: float, sign: int, tokens: int) -> int:
    """Return the tokens with which the interval would end at the limit: it narrows as a root."""
    width = abs((worst if sign * value <= sign * limit else best) - value)
    distance = abs(limit - value)
    factor = 4.0  # where the width is not known
    if math.isfinite(width):
        factor = min(width / distance, _MOST) ** 2 if distance else _MOST
    wanted = tokens * min(max(factor, 1.1), _MOST)
    digits: int = 10 ** max(len(str(int(wanted))) - 2, 0)  # two are as many as are known
    return max(math.ceil(wanted / digits) * digits, _TAIL)


_NAMES = {
    "kl": "KL divergence",
    "p99": "99th percentile of the KL divergence",
    "perplexity": "perplexity change",
    "top1": "same next token",
}


def _reason(measure: Measure) -> str:
    percent = measure.name in ("perplexity", "top1")

    def text(value: float | None) -> str:
        if value is None:
            return "unbounded"
        if not percent:
            return number(value)
        return f"{100 * value:{'+' if measure.name == 'perplexity' else ''}.1f} %"

    below, above = ("at least", "below") if measure.name == "top1" else ("at most", "above")
    rule = {
        SHIP: f"{below} {text(measure.ship)}",
        LOOK: f"{above} {text(measure.ship)}",
        STOP: f"{above} {text(measure.stop)}",
        "": f"ship {below} {text(measure.ship)}, stop {above} {text(measure.stop)}",
    }[measure.word]
    between = f"{text(measure.low)} to {text(measure.high)}"
    return f"{_NAMES[measure.name]} {text(measure.value)} ({between}): {rule}"
