"""`steelyard demo`: the model that ships with the package, quantized in several ways."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.evaluate import add_to_report, numbers_of
from steelyard.cli.quantize import report_in
from steelyard.cli.ranks import is_first
from steelyard.cli.terminal import (
    Column,
    duration,
    number,
    print_document,
    print_line,
    print_table,
    size,
)

if TYPE_CHECKING:
    from steelyard.modifiers import QuantizationModifier
    from steelyard.pipelines.result import Result

__all__ = ["demo"]

GROUP = 32  # divides the columns of any small model


def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Where the checkpoints go.",
            show_default="a folder for temporary files",
        ),
    ] = None,
    samples: options.Samples = 16,
    max_seq_length: options.MaxSeqLength = 128,
    json: options.Json = False,
) -> None:
    """Quantize and measure the small model that comes along.

    Static and dynamic int8 and FP8, int4 with three observers, NVFP4.
    Takes a minute or two, and no network.

    \b
    Example:
      steelyard demo -o demo
    """
    from steelyard.checkpoint import Shards
    from steelyard.demo import (  # type: ignore[import-not-found,unused-ignore]
        calibration_texts,
        held_out_texts,
        model_folder,
    )
    from steelyard.evaluate import evaluate
    from steelyard.pipelines.oneshot import oneshot

    started = time.perf_counter()
    folder = output or Path(tempfile.mkdtemp(prefix="steelyard-demo-"))
    model = Path(model_folder())
    calibration, held_out = calibration_texts(samples), held_out_texts(samples)
    original = Shards(model).total_bytes
    found: list[dict[str, Any]] = []
    for name, recipe in ways().items():
        if is_first() and not json:
            typer.echo(f"{name} ...", err=True)
        target = folder / name.replace(" ", "-")
        result = oneshot(
            model,
            recipe,
            calibration if recipe.needs_data else None,
            target,
            num_calibration_samples=samples,
            max_seq_length=max_seq_length,
            overwrite=True,
            show_progress=False,
        )
        measured = evaluate(
            model,
            target,
            held_out,
            num_samples=samples,
            max_seq_length=max_seq_length,
            show_progress=False,
        ).as_dict()
        report = report_in(target)
        if (target / "report.json").is_file() and is_first():
            add_to_report(target, measured)
        found.append(
            {
                "name": name,
                "output": str(target),
                "report": None if report is None else str(report),
                "bytes": Shards(target).total_bytes,
                "error": _mean_error(result),
                "seconds": result.seconds,
                "evaluation": measured,
            }
        )
    page = None
    if is_first():
        page = write_demo_report(found, folder)
    if json:
        content = {
            "model": str(model),
            "source_bytes": original,
            "report": None if page is None else str(page),
            "results": found,
        }
        print_document("demo", content)
        return
    _print(found, original, folder, page, time.perf_counter() - started)


def _mean_error(result: Result) -> float:
    """Return the error of the stored weights, each module counted by its size."""
    sizes = {p.name: p.shape[0] * p.shape[1] for p in result.plan.quantized}
    known = {name: m.error for name, m in result.modules.items() if m.error is not None}
    return sum(e * sizes[n] for n, e in known.items()) / max(sum(sizes[n] for n in known), 1)


def ways() -> dict[str, QuantizationModifier]:
    """Return the recipes of the demonstration by name."""
    from steelyard.modifiers import GPTQModifier, QuantizationModifier
    from steelyard.modifiers.quantization.observers import ObserverChoice

    int4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    int8 = {"num_bits": 8, "strategy": "channel"}
    static = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "observer": "static_minmax"}

    def recipe(
        kind: type[QuantizationModifier], observer: str, **parts: Any
    ) -> QuantizationModifier:
        groups = {"group_0": {"targets": ["Linear"], **parts}}
        return kind(
            config_groups=groups, ignore=["lm_head"], weight_observer=ObserverChoice(name=observer)
        )

    plain = QuantizationModifier
    return {
        "W8A8 static": recipe(plain, "optimal", weights=int8, input_activations=static),
        "FP8_DYNAMIC": plain(scheme="FP8_DYNAMIC", ignore=["lm_head"]),
        "W4A16 min-max": recipe(plain, "memoryless_minmax", weights=int4),
        "W4A16 optimal": recipe(plain, "optimal", weights=int4),
        "W4A16 GPTQ": recipe(GPTQModifier, "optimal", weights=int4),
        "NVFP4A16": plain(
            scheme="NVFP4A16", ignore=["lm_head"], weight_observer=ObserverChoice(name="optimal")
        ),
    }


def write_demo_report(found: list[dict[str, Any]], folder: Path) -> Path:
    """Write a page that compares the checkpoints; each has one of its own, too."""
    from steelyard.report import (  # type: ignore[import-not-found,unused-ignore]
        ComparisonRow,
        Report,
        write_files,
    )

    rows = [
        ComparisonRow(
            scheme=each["name"],
            bytes=each["bytes"],
            error=each["error"],
            seconds=each["seconds"],
            evaluation=numbers_of(each["evaluation"]),
        )
        for each in found
    ]
    write_files(Report(title="steelyard demo", comparison=rows), folder)
    return folder / "report.html"


def _print(
    found: list[dict[str, Any]], original: int, folder: Path, page: Path | None, seconds: float
) -> None:
    base = found[0]["evaluation"]["base_perplexity"]
    rows = [["as it was", size(original), number(base, 4), "", "", ""]]
    rows += [
        [
            each["name"],
            size(each["bytes"]),
            number(each["evaluation"]["perplexity"], 4),
            number(each["evaluation"]["kl_divergence"]),
            f"{100 * each['evaluation']['top1_agreement']:.1f} %",
            duration(each["seconds"]),
        ]
        for each in found
    ]
    print_table(
        [
            Column("scheme"),
            Column("size", True),
            Column("perplexity", True),
            Column("KL", True),
            Column("same token", True),
            Column("time", True),
        ],
        rows,
    )
    print_line()
    print_line(
        f"{len(found)} checkpoints in {folder}, {duration(seconds)}; KL is the divergence from the "
        "original, less is better"
    )
    print_line(f"report: {page}")
