"""`steelyard demo`: quantizes the included model in several ways and measures each."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from steelyard.cli import options
from steelyard.cli.evaluate import numbers_of
from steelyard.cli.rank_streams import is_first
from steelyard.cli.terminal import (
    Column,
    duration,
    print_document,
    print_line,
    print_table,
    size,
)

if TYPE_CHECKING:
    from steelyard.engine.result import Result

__all__ = ["demo"]

TITLE = "Steelyard's demo"
MEASURED = ("kl_divergence", "perplexity", "top1_agreement")


class Variant(NamedTuple):
    """One way to quantize the model: a scheme and an observer or algorithm."""

    scheme: str
    observer: str
    recipe: Any

    @property
    def title(self) -> str:
        """Title of the checkpoint's report."""
        return f"{self.scheme}, {self.observer}"

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return f"{self.scheme}-{self.observer}".replace(" + ", "-").replace(" ", "-")


def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            parser=options.output_path,
            help="Folder for the checkpoints; those of an earlier demo are replaced.",
            show_default="a temporary folder",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace other checkpoints in the folder, too.")
    ] = False,
    samples: options.Samples = 16,
    max_seq_length: options.MaxSeqLength = 512,
    json: options.Json = False,
) -> None:
    """Quantize and measure the included small model.

    In 8, 4 and 3 bits, with and without calibration data. Takes a minute and needs no network.

    \b
    Example:
      steelyard demo -o demo
    """
    import torch

    from steelyard.demo import calibration_texts, held_out_texts, model_folder
    from steelyard.engine.progress import progress

    started = time.perf_counter()
    if output is not None:
        check_places(output, overwrite)
    folder = output or Path(tempfile.mkdtemp(prefix="steelyard-demo-"))
    model = model_folder()
    calibration, held_out = calibration_texts(samples), held_out_texts(samples)
    limits = {"max_seq_length": max_seq_length, "show_progress": False}
    found = []
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    with progress("demo", len(variants()), None if is_first() else False) as step:
        for variant in variants():
            if is_first() and not sys.stderr.isatty():
                print(f"{variant.scheme}, {variant.observer}", file=sys.stderr)
            found.append(_run(variant, model, calibration, held_out, folder / variant.name, limits))
            step()
    page = folder / "report.html"
    if is_first():
        write_demo_report(found, folder)
    original = _stored_bytes(model)
    if json:
        content = {"model": str(model), "source_bytes": original, "report": str(page)}
        print_document("demo", {**content, "results": found})
        return
    _print(found, original)
    print_line()
    print_line(f"KL is the divergence from the original in nats per token, over {samples} held-out")
    print_line("texts: less is better.")
    print_line(f"{len(found)} checkpoints in {duration(time.perf_counter() - started)}: {folder}")
    print_line(f"report: {page}", style="bold green")
    print_line()
    print_line("Next, a model of your own (a folder, or a name on the hub):")
    print_line(f"  {program()} quantize path/to/model -o model-W4A16 --scheme W4A16")


def program() -> str:
    """Return the command that runs this program: its name if the shell finds it, else its path."""
    found = shutil.which("steelyard")
    own = Path(sys.argv[0])
    if own.name != "steelyard" or (found and Path(found).resolve() == own.resolve()):
        return "steelyard"
    return shlex.quote(str(own))


def check_places(folder: Path, overwrite: bool) -> None:
    """Refuse, before any work, to replace files that no earlier demo wrote."""
    from steelyard.atomic_file import FileKind
    from steelyard.checkpoint.place import check_output
    from steelyard.errors import ReportError
    from steelyard.report import report_at

    def title_at(path: Path) -> str | None:
        report = report_at(path)
        return None if report is None else report.title

    for variant in variants():
        place = (folder / variant.name).resolve()
        check_output(place, overwrite or title_at(place / "report.json") == variant.title)
    page = FileKind("report of a demo", lambda path: title_at(path) == TITLE, ReportError)
    for name in ("report.json", "report.html") if folder.is_dir() else ():
        page.check_place(folder / name)


def _run(
    variant: Variant,
    model: Path,
    calibration: list[str],
    held_out: list[str],
    folder: Path,
    limits: dict[str, Any],
) -> dict[str, Any]:
    """Quantize the model in one way, measure it, and return the results as JSON types."""
    from steelyard.entry import oneshot
    from steelyard.evaluate import evaluate
    from steelyard.recipes import load_recipe
    from steelyard.report import read_report, write_files

    data = calibration if load_recipe(variant.recipe).needs_data else None
    result = oneshot(model, variant.recipe, data, folder, overwrite=True, **limits)
    measured = evaluate(model, folder, held_out, **limits).as_dict()
    report = read_report(folder).model_copy(
        update={"title": variant.title, "evaluation": numbers_of(measured)}
    )
    if is_first():
        write_files(report, folder)
    summary = report.summary
    return {
        "scheme": variant.scheme,
        "observer": variant.observer,
        "output": str(folder),
        "report": str(folder / "report.html"),
        "bytes": _stored_bytes(folder),
        "bits_per_weight": None if summary is None else summary.bits_per_weight,
        "error": _mean_error(result),
        "seconds": result.seconds,
        "evaluation": measured,
    }


def variants() -> list[Variant]:
    """Return the variants of the demo, from the most to the fewest bits.

    Schemes without a preset in older versions of compressed-tensors are written out.
    """
    from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier

    def scheme(**parts: Any) -> dict[str, Any]:
        return {"config_groups": {"group_0": {"targets": ["Linear"], **parts}}}

    def integers(bits: int) -> dict[str, Any]:
        return {"num_bits": bits, "strategy": "group", "group_size": 128}

    def plain(what: dict[str, Any], observer: str = "memoryless_minmax") -> Any:
        options = {**what, "ignore": ["lm_head"], "weight_observer": observer}
        return QuantizationModifier(**options)

    channels = {"num_bits": 8, "strategy": "channel"}
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "observer": "static_minmax"}
    static = scheme(weights=channels, input_activations=inputs)
    found = [
        Variant("W8A16", "memoryless_minmax", plain(scheme(weights=integers(8)))),
        Variant("W8A8", "static_minmax", plain(static)),
        Variant("FP8_DYNAMIC", "memoryless_minmax", plain({"scheme": "FP8_DYNAMIC"})),
    ]
    for name, what in {
        "NVFP4A16": {"scheme": "NVFP4A16"},
        "W4A16": scheme(weights=integers(4)),
        "W3A16": scheme(weights=integers(3)),
    }.items():
        found += [
            Variant(name, "memoryless_minmax", plain(what)),
            Variant(name, "optimal + data", [IMatrixGatherer(), plain(what, "optimal")]),
            Variant(name, "GPTQ", GPTQModifier(**what, ignore=["lm_head"])),
        ]
    return found


def write_demo_report(found: list[dict[str, Any]], folder: Path) -> None:
    """Write a page that compares the checkpoints; each also has a report of its own."""
    from steelyard.report import ComparisonRow, Report, write_files

    rows = [
        ComparisonRow(
            **{key: each[key] for key in ("scheme", "observer", "bytes", "error", "seconds")},
            bits_per_weight=each["bits_per_weight"],
            evaluation={name: each["evaluation"][name] for name in MEASURED},
        )
        for each in found
    ]
    tokens = found[0]["evaluation"]["tokens"]
    notes = [
        f"KL divergence from the original is the mean over {tokens:,} held-out tokens, in nats; "
        "less is better. The error is that of the weights: GPTQ lets it grow where inputs are "
        "small.",
        "Each checkpoint is in a folder beside this page, with a report of its own.",
    ]
    write_files(Report(title=TITLE, comparison=rows, notes=notes), folder)


def _mean_error(result: Result) -> float:
    """Return the mean error of the stored weights, weighted by the size of modules."""
    sizes = {p.name: p.shape[0] * p.shape[1] for p in result.plan.quantized}
    known = {name: m.error for name, m in result.modules.items() if m.error is not None}
    return sum(e * sizes[n] for n, e in known.items()) / max(sum(sizes[n] for n in known), 1)


def _stored_bytes(folder: Path) -> int:
    from steelyard.checkpoint import Shards

    with Shards(folder) as shards:
        return shards.total_bytes


def _print(found: list[dict[str, Any]], original: int) -> None:
    base = found[0]["evaluation"]["base_perplexity"]
    rows = [["original", "", size(original), "16", "", f"{base:.2f}", ""]]
    for each in found:
        measured = each["evaluation"]
        rows.append(
            [
                each["scheme"],
                each["observer"],
                size(each["bytes"]),
                f"{each['bits_per_weight']:.2f}",
                f"{measured['kl_divergence']:.5f}",
                f"{measured['perplexity']:.2f}",
                f"{100 * measured['top1_agreement']:.1f} %",
            ]
        )
    print_table(
        [
            Column("scheme"),
            Column("observer"),
            Column("size", True),
            Column("bits", True),
            Column("KL", True),
            Column("perplexity", True),
            Column("top-1", True),
        ],
        rows,
    )
