"""`steelyard evaluate`: compares a quantized model with the original."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.mistakes import Interrupted
from steelyard.cli.rank_streams import is_first
from steelyard.cli.terminal import Column, number, print_document, print_line, print_table
from steelyard.errors import ReportError

if TYPE_CHECKING:
    from steelyard.evaluate import Evaluation

__all__ = ["evaluate"]


def evaluate(
    base: Annotated[
        str,
        typer.Argument(metavar="BASE", callback=options.existing_model, help="The original model."),
    ],
    quantized: Annotated[
        str,
        typer.Argument(
            metavar="QUANTIZED", callback=options.existing_model, help="The quantized checkpoint."
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Held-out data, not used for calibration; files as for quantize.",
            show_default=False,
        ),
    ],
    samples: options.Samples = 128,
    max_seq_length: options.MaxSeqLength = 2048,
    batch_size: options.BatchSize = 1,
    text_column: options.TextColumn = "text",
    split: options.Split = None,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Measure how far a quantized model is from the original.

    Reports the perplexity of both, the KL divergence between them, and how often they predict the
    same next token. If the checkpoint has a report, the result is added to it.

    \b
    Example:
      steelyard evaluate path/to/model model-FP8 --data held-out.txt --samples 4
    """
    from steelyard.evaluate import EvaluationInterrupted
    from steelyard.evaluate import evaluate as run

    try:
        found = run(
            base,
            quantized,
            data,
            num_samples=samples,
            max_seq_length=max_seq_length,
            batch_size=batch_size,
            text_column=text_column,
            split=split,
            seed=seed,
            trust_remote_code_model=trust_remote_code,
            show_progress=is_first(),
        )
    except EvaluationInterrupted as stopped:
        if json:
            raise Interrupted(str(stopped)) from None
        _print(stopped.so_far, data)
        raise Interrupted(f"{stopped}; the figures above are for those") from None
    except KeyboardInterrupt:
        raise Interrupted(
            "there are no figures yet: tokens are scored after the last layer of both models"
        ) from None
    content: dict[str, Any] = found.as_dict()
    if json:
        print_document("evaluate", {"base": base, "quantized": quantized, **content})
    else:
        _print(found, data)
    report = Path(quantized) / "report.json"
    if report.is_file() and is_first():
        sys.stdout.flush()  # a failure from here on must not lose the figures
        add_to_report(Path(quantized), content)
        if not json:
            print_line(f"added to {report}")


def _print(found: Evaluation, data: str) -> None:
    content = found.as_dict()
    change = found.perplexity_change
    print_table(
        [Column(""), Column("original", True), Column("quantized", True), Column("change", True)],
        [
            [
                "perplexity",
                _fixed(content["base_perplexity"]),
                _fixed(content["perplexity"]),
                f"{100 * change:+.2f} %" if math.isfinite(change) else "",
            ],
            ["KL divergence", "", number(content["kl_divergence"], 4), ""],
            ["KL, 99th percentile", "", number(content["kl_p99"], 4), ""],
            ["same next token", "", f"{100 * content['top1_agreement']:.1f} %", ""],
        ],
    )
    print_line()
    print_line(f"over {content['tokens']:,} tokens of {data}")
    for note in content["notes"]:
        print_line(f"note: {note}")


def _fixed(value: float | None) -> str:
    return "too large" if value is None else f"{value:.3f}"


def add_to_report(folder: Path, evaluation: dict[str, Any]) -> None:
    """Add the numbers of an evaluation to the report beside a checkpoint."""
    from steelyard.report import add_evaluation

    try:
        add_evaluation(folder, numbers_of(evaluation))
    except ReportError as error:
        raise ReportError(f"the figures above were not added to the report: {error}") from error


def numbers_of(evaluation: dict[str, Any]) -> dict[str, float]:
    return {name: v for name, v in evaluation.items() if isinstance(v, (int, float))}
