"""`steelyard evaluate`: compares a quantized model with the original."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.known import one_of
from steelyard.cli.mistakes import Interrupted
from steelyard.cli.rank_streams import is_first
from steelyard.cli.terminal import Column, number, print_document, print_line, print_table
from steelyard.data.file_names import data_file
from steelyard.errors import ReportError

if TYPE_CHECKING:
    from steelyard.evaluate import Evaluation, Study

__all__ = ["Limit", "add_to_report", "evaluate", "numbers_of", "print_study"]

BELOW = 3  # the exit code of a verdict below --require
STYLES = {"ship": "bold green", "look": "bold yellow", "do not ship": "bold red"}

Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=SHIP[:STOP]",
        help="A limit of the verdict: kl, p99, perplexity or top1, up to where it says ship "
        "and from where on do not ship; may be repeated.",
        show_default="kl=0.05:0.2 p99=0.6:2.5 perplexity=0.03:0.1 top1=0.9:0.8",
    ),
]


def _word(value: str | None) -> str | None:
    return value if value is None else one_of("verdict", value, ("ship", "look"))


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
    device: options.Device = "auto",
    require: Annotated[
        str | None,
        typer.Option(
            "--require",
            metavar="VERDICT",
            callback=_word,
            help="Exit with 3 unless the verdict is at least this: ship, or look.",
            show_default=False,
        ),
    ] = None,
    limit: Limit = None,
    blocks: Annotated[
        bool,
        typer.Option(
            "--blocks/--no-blocks",
            help="Find what modules and blocks cost, which reads both models once more.",
        ),
    ] = True,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Compare a quantized model with the original: ship it or not.

    Reports the perplexity of both, the KL divergence between them, how often they predict the same
    next token, the verdict, and the blocks that cost most. If the checkpoint has a report, the
    result is added to it.

    \b
    Examples:
      steelyard evaluate path/to/model model-FP8 --data held-out.txt --samples 4
      steelyard evaluate path/to/model model-FP8 --data held-out.txt --require ship
    """
    data_file(data)  # before imports that take seconds
    from steelyard.evaluate import EvaluationInterrupted, Limits
    from steelyard.evaluate import study as run

    limits = Limits.parse(limit or [])
    try:
        found = run(
            base,
            quantized,
            data,
            limits=limits,
            blocks=blocks,
            num_samples=samples,
            max_seq_length=max_seq_length,
            batch_size=batch_size,
            text_column=text_column,
            split=split,
            seed=seed,
            device=device,
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
    if json:
        print_document("evaluate", {"base": base, "quantized": quantized, **found.as_dict()})
    else:
        print_study(found, data)
    report = Path(quantized) / "report.json"
    if report.is_file() and is_first():
        sys.stdout.flush()  # a failure from here on must not lose the figures
        add_to_report(Path(quantized), found)
        if not json:
            print_line(f"added to {report}")
    if require is not None and not found.verdict.meets(require):
        raise typer.Exit(BELOW)


def print_study(found: Study, data: str) -> None:
    """Print the figures of an evaluation and its verdict."""
    _print(found.evaluation, data)
    _print_verdict(found)


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


def _print_verdict(found: Study) -> None:
    """Print the verdict with its reasons, and the blocks that cost most."""
    from steelyard.evaluate.larger_recipe import costliest

    verdict = found.verdict
    print_line()
    print_line(f"verdict: {verdict.word}", STYLES[verdict.word])
    for reason in verdict.reasons:
        print_line(f"  {reason}")
    diagnosis = found.diagnosis
    costly = [] if diagnosis is None else costliest(diagnosis.blocks)
    if diagnosis is not None and costly:
        print_line()
        print_line(f"blocks that cost most, measured on {diagnosis.tokens:,} tokens:")
        rows = [
            [
                block.name,
                "-" if not block.error else f"{-10 * math.log10(block.error):.1f}",
                f"{block.gain:.4f}",
                f"{', '.join(block.schemes)} -> {', '.join(block.larger)}",
            ]
            for block in costly
        ]
        titles = [Column("block"), Column("output SNR, dB", True), Column("KL less", True)]
        print_table([*titles, Column("with")], rows)
        print_line("the recipe that does so is in the report, and under better_recipe in --json")


def add_to_report(folder: Path, found: Study) -> None:
    """Add an evaluation to the report beside a checkpoint."""
    from steelyard.report import add_study

    try:
        add_study(folder, found)
    except ReportError as error:
        raise ReportError(f"the figures above were not added to the report: {error}") from error


def numbers_of(evaluation: dict[str, Any]) -> dict[str, float]:
    return {name: v for name, v in evaluation.items() if isinstance(v, (int, float))}
