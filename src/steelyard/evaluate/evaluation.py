"""The result of an evaluation, as numbers, as JSON and as a table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Evaluation", "EvaluationInterrupted"]


@dataclass(frozen=True)
class Evaluation:
    """Metrics of two models on one text.

    base, quantized: the folders
    samples, tokens: number of samples, and of scored tokens: all but the first of each sample
    base_perplexity: exp of the mean negative log-likelihood of the tokens, for the base model
    perplexity:      the same for the quantized model
    kl_divergence:   mean over tokens of KL(base || quantized), in nats
    kl_p99, kl_max:  99th percentile and maximum of the KL divergence over tokens
    top1_agreement:  fraction of tokens for which both models predict the same token
    notes:           the data used, and differences from how the model is served
    kl_error:        standard error of kl_divergence; None if there are too few tokens for one
    loss_error:      standard error of the difference of the two mean log-likelihoods
    top1_error:      standard error of top1_agreement
    kl_p99_low, kl_p99_high: bounds of kl_p99, two standard errors of its rank on either side
    """

    base: str
    quantized: str
    samples: int
    tokens: int
    base_perplexity: float
    perplexity: float
    kl_divergence: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    seconds: float
    notes: tuple[str, ...] = ()
    kl_error: float | None = None
    loss_error: float | None = None
    top1_error: float | None = None
    kl_p99_low: float | None = None
    kl_p99_high: float | None = None

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity; NaN if it is undefined."""
        return self.perplexity / self.base_perplexity - 1 if self.base_perplexity else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types; an infinite perplexity is None."""
        content = asdict(self)
        content["notes"] = list(self.notes)
        floats = {k: v for k, v in content.items() if isinstance(v, float)}
        return {**content, **{k: v if math.isfinite(v) else None for k, v in floats.items()}}

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table: label and value."""
        return [
            ("tokens", f"{self.tokens:,} of {self.samples:,} samples"),
            ("base perplexity", f"{self.base_perplexity:.4f}"),
            ("perplexity", f"{self.perplexity:.4f} ({self.perplexity_change:+.2%})"),
            ("KL divergence", f"{self.kl_divergence:.6f} nats"),
            ("KL, 99th percentile", f"{self.kl_p99:.6f}"),
            ("KL, maximum", f"{self.kl_max:.6f}"),
            ("top-1 agreement", f"{self.top1_agreement:.2%}"),
            ("seconds", f"{self.seconds:.1f}"),
        ]

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        lines = [f"{label:<{width}}  {value}" for label, value in self.rows()]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"{self.quantized}\n  compared with {self.base}", *lines, *notes])

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table("", self.quantized, title=f"compared with {self.base}")
        for row in self.rows():
            table.add_row(*row)
        table.caption = "\n".join(self.notes) or None
        return table


class EvaluationInterrupted(KeyboardInterrupt):
    """Raised for Ctrl-C during scoring.

    so_far: the result over the samples scored so far
    tokens: number of tokens that were to be scored
    """

    def __init__(self, so_far: Evaluation, tokens: int) -> None:
        super().__init__(f"{so_far.tokens:,} of {tokens:,} tokens were scored")
        self.so_far = so_far
        self.tokens = tokens
