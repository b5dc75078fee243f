"""`steelyard observe`: saves the statistics of a calibration run, without a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli import options, placing
from steelyard.cli.rank_streams import is_first, join
from steelyard.cli.recipe import recipe_from
from steelyard.cli.terminal import duration, print_document, print_line, size
from steelyard.data.file_names import data_file
from steelyard.engine.announce import STYLES
from steelyard.words import count

__all__ = ["observe"]


def observe(
    model: options.Model,
    output: options.OutputFile,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Calibration data: a .txt, .jsonl or .parquet file, or a dataset on the hub.",
            show_default=False,
        ),
    ],
    scheme: options.SchemeName = None,
    observer: options.ObserverName = None,
    recipe: options.RecipeFile = None,
    plugins: options.Plugins = None,
    ignore: options.Ignore = None,
    targets: options.Targets = None,
    samples: options.Samples = 512,
    max_seq_length: options.MaxSeqLength = 2048,
    batch_size: options.BatchSize = 1,
    seed: options.Seed = 0,
    text_column: options.TextColumn = "text",
    split: options.Split = None,
    tokenizer: options.Tokenizer = None,
    device: placing.Device = "auto",
    activations: placing.Activations = "auto",
    pipeline: options.Pipeline = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Save the statistics of a calibration run, without a checkpoint.

    `steelyard merge` merges files of several runs over parts of the data, and
    `steelyard quantize --statistics` writes a checkpoint from them.

    \b
    Example:
      steelyard observe path/to/model --data calibration.txt --scheme FP8 -o statistics.safetensors
    """
    data_file(data)  # before imports that take seconds
    made = recipe_from(scheme, recipe, observer, ignore, targets)
    from steelyard.entry import oneshot

    join()
    result = oneshot(
        model,
        made,
        data,
        tokenizer=tokenizer,
        num_calibration_samples=samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        text_column=text_column,
        splits=split,
        seed=seed,
        device=device,
        activations=activations,
        pipeline=pipeline,
        save_statistics=output,
        trust_remote_code_model=trust_remote_code,
        show_progress=is_first(),
    )
    tokens = {name: module.tokens for name, module in result.modules.items()}
    if json:
        content = {"output": str(output), "tokens": tokens, "notes": result.notes}
        print_document("observe", content)
        return
    for note in result.notes:
        kind = "warning" if note in result.warnings else "note"
        print_line(f"{kind}: {note}", STYLES.get(kind))
    print_line(
        f"{output}: statistics of {count(len(tokens), 'module')}, {size(output.stat().st_size)}, "
        f"in {duration(result.seconds)}"
    )
