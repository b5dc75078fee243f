"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.known import PIPELINES, UNCALIBRATABLE, UNCALIBRATED, completing, one_of
from steelyard.names import WEIGHT_OBSERVER, observer_names, scheme_names

__all__ = [
    "All",
    "BatchSize",
    "Data",
    "Device",
    "Filter",
    "Gptq",
    "GroupSize",
    "Ignore",
    "Json",
    "MaxSeqLength",
    "Model",
    "NumBits",
    "ObserverName",
    "OutputFile",
    "Pipeline",
    "Plugins",
    "RecipeFile",
    "Samples",
    "SchemeName",
    "Seed",
    "Split",
    "Targets",
    "TextColumn",
    "Tokenizer",
    "TrustRemoteCode",
    "Uncalibratable",
    "Uncalibrated",
    "existing_model",
    "output_path",
]


def existing_model(name: str) -> str:
    """Return the name of a model; a name that looks like a path must be a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if path.exists():
        raise typer.BadParameter(f"{name} is a file; give its folder")
    if looks_local or not name:
        raise typer.BadParameter(
            f"there is no folder {name!r}; give a folder, or a name on the hub"
        )
    return name


def output_path(given: str) -> Path:
    """Return an output path; refuse an empty one, which would be the current folder."""
    if not given.strip():
        raise typer.BadParameter("the output path is empty, perhaps an unset variable; name one")
    return Path(given)


def _scheme(value: str | None) -> str | None:
    return None if value is None else one_of("scheme", value, scheme_names())


def _observer(value: str | None) -> str | None:
    return None if value is None else one_of("observer", value, observer_names())


def _plugins(names: list[str] | None) -> list[str]:
    from steelyard.plugins import load_plugin

    for name in names or ():
        load_plugin(name)
    return list(names or ())


def _pipeline(value: str) -> str:
    return one_of("pipeline", value, PIPELINES)


def _uncalibratable(value: str) -> str:
    return one_of("choice", value, UNCALIBRATABLE)


def _uncalibrated(value: str) -> str:
    return one_of("choice", value, UNCALIBRATED)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        callback=existing_model,
        help="A folder with a model, or a name on the hub.",
        show_default=False,
    ),
]
OutputFile = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        parser=output_path,
        help="The file to write.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output, nothing else.")
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        metavar="PATTERN",
        help="Only modules whose name contains this; with * or ?, a pattern for the whole name; "
        "after re:, a regular expression for its start.",
        show_default=False,
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every tensor, on a line of its own.")]
SchemeName = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        metavar="NAME",
        callback=_scheme,
        autocompletion=completing(scheme_names),
        help="A preset such as W4A16; `steelyard ls schemes` lists them. Not with --recipe.",
        show_default=False,
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        callback=_plugins,
        is_eager=True,
        help="A .py file or module of your own observers, modifiers and algorithms; may repeat.",
        show_default=False,
    ),
]
RecipeFile = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        help="A recipe in YAML, for what --scheme cannot express.",
        show_default=False,
    ),
]
ObserverName = Annotated[
    str | None,
    typer.Option(
        "--observer",
        metavar="NAME",
        callback=_observer,
        autocompletion=completing(observer_names),
        help="Observer for weights; `steelyard ls observers` lists them.",
        show_default=WEIGHT_OBSERVER,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="NAME",
        help="A module, a class, or re: and an expression, not to quantize; may be repeated. "
        "The output head (lm_head) is ignored too, unless --targets names it or an empty name is "
        "given.",
        show_default=False,
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--targets",
        metavar="NAME",
        help="Modules to quantize, as for --ignore; may be repeated. Without it: Linear.",
        show_default=False,
    ),
]
Gptq = Annotated[bool, typer.Option("--gptq", help="Round with GPTQ, which needs --data.")]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--group-size",
        metavar="N",
        min=1,
        help="Columns that share a scale, for integer schemes with groups.",
        show_default="that of the scheme",
    ),
]
NumBits = Annotated[
    int | None,
    typer.Option(
        "--num-bits",
        metavar="N",
        min=2,
        max=8,
        help="Bits of a weight, for schemes with integer weights.",
        show_default="that of the scheme",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Calibration data: a .txt, .jsonl, .csv or .parquet file, a dataset on the hub, or "
        "`demo` for the built-in text.",
        show_default=False,
    ),
]
TextColumn = Annotated[
    str, typer.Option("--text-column", metavar="NAME", help="The column of the data with the text.")
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="NAME",
        help="The split of a dataset on the hub that has several.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="A tokenizer, if the model's folder has none.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that ships with a model.")
]
Samples = Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Number of samples.")]
MaxSeqLength = Annotated[
    int, typer.Option("--max-seq-length", metavar="N", min=1, help="Maximum tokens per sample.")
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", metavar="N", min=1, help="Samples per batch.")
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where to compute: cpu, or an accelerator such as cuda, cuda:1 or xpu; auto takes the "
        "accelerator if there is one.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed for selecting samples.")]
Pipeline = Annotated[
    str,
    typer.Option(
        "--pipeline",
        metavar="NAME",
        callback=_pipeline,
        autocompletion=completing(lambda: PIPELINES),
        help="sequential: layer by layer; basic: the whole model at once; datafree: file by file; "
        "auto chooses.",
    ),
]
Uncalibratable = Annotated[
    str,
    typer.Option(
        "--uncalibratable",
        metavar="CHOICE",
        callback=_uncalibratable,
        autocompletion=completing(lambda: UNCALIBRATABLE),
        help="What to do with modules whose inputs no static scale serves: note, "
        "dynamic, or leave.",
    ),
]
Uncalibrated = Annotated[
    str,
    typer.Option(
        "--uncalibrated",
        metavar="CHOICE",
        callback=_uncalibrated,
        autocompletion=completing(lambda: UNCALIBRATED),
        help="What to do with modules that saw no calibration token: error, or weights-only.",
    ),
]
