"""`steelyard inspect`: shows the contents of a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.grouping import matching
from steelyard.cli.terminal import (
    Column,
    number,
    print_document,
    print_line,
    print_table,
    shape_text,
    size,
)
from steelyard.model.module_names import grouped
from steelyard.words import count

if TYPE_CHECKING:
    from steelyard.checkpoint.contents import Contents, ModuleContents

__all__ = ["inspect"]


def inspect(
    model: options.Model,
    filter: options.Filter = None,
    all: options.All = False,
    scales: Annotated[
        bool, typer.Option("--scales/--no-scales", help="Read the scales, or only the headers.")
    ] = True,
    json: options.Json = False,
) -> None:
    """Show the types, shapes, sizes and scales of a checkpoint.

    Modules that differ only in numbers share a line. Of the values, only scales are read.

    \b
    Examples:
      steelyard inspect path/to/model
      steelyard inspect path/to/model --filter 're:.*mlp' --json
      steelyard inspect path/to/model --all
    """
    keep = matching(filter)
    from steelyard.checkpoint.contents import read_contents
    from steelyard.model.model_folder import model_folder

    contents = read_contents(model_folder(model), keep, scales)
    if filter is not None and not contents.modules:
        raise typer.BadParameter(f"no module of {model} matches {filter!r}")
    if json:
        print_document("inspect", as_document(contents))
        return
    print_contents(contents, all)


def as_document(contents: Contents) -> dict[str, Any]:
    """Return the contents as JSON types."""
    return {
        "model": str(contents.folder),
        "files": contents.files,
        "model_type": contents.model_type,
        "quantization": contents.quantization,
        "bytes": contents.nbytes,
        "weights": contents.weights,
        "bits_per_weight": contents.bits_per_weight,
        "problems": contents.problems,
        "modules": {
            module.name: {
                "type": module.kind,
                "format": module.format,
                "shape": module.shape,
                "weights": module.weights,
                "bytes": module.nbytes,
                "tensors": {
                    local: {
                        "dtype": str(info.dtype).removeprefix("torch."),
                        "shape": info.shape,
                        "bytes": info.nbytes,
                        "file": info.file.name,
                    }
                    for local, info in module.tensors.items()
                },
                "scales": {local: asdict(found) for local, found in module.scales.items()},
            }
            for module in contents.modules
        },
    }


def print_contents(contents: Contents, all_tensors: bool) -> None:
    if all_tensors:
        _print_tensors(contents)
    else:
        _print_modules(contents)
    _print_scales(contents, all_tensors)
    print_line()
    formats = Counter(module.format for module in contents.modules if module.format is not None)
    quantized = ", ".join(f"{count} {name}" for name, count in formats.items())
    bits = contents.bits_per_weight
    facts = [
        count(len(contents.modules), "module") + (f" ({quantized})" if quantized else ""),
        f"{contents.weights / 1e6:,.1f} million weights" if contents.weights else None,
        f"{size(contents.nbytes)} in {count(contents.files, 'file')}",
        f"{bits:.2f} bits per weight" if bits is not None else None,
    ]
    what = [contents.model_type or "unknown model", contents.quantization]
    print_line(f"{', '.join(filter(None, what))}: {', '.join(filter(None, facts))}", style="bold")
    for problem in contents.problems:
        print_line(f"problem: {problem}", style="red")


def _print_modules(contents: Contents) -> None:
    def alike(module: ModuleContents) -> Any:
        return module.kind, module.format, module.shape, tuple(sorted(module.tensors))

    rows = [
        [
            label,
            str(len(members)),
            members[0].kind.replace(" group ", " g"),
            shape_text(members[0].shape),
            size(sum(module.nbytes for module in members)),
        ]
        for label, members in grouped(contents.modules, lambda m: m.name, alike)
    ]
    columns = [
        Column("modules"),
        Column("n", True),
        Column("type"),
        Column("shape", True),
        Column("size", True),
    ]
    print_table(columns, rows)


def _print_tensors(contents: Contents) -> None:
    print_table(
        [Column("tensor"), Column("type"), Column("shape", True), Column("size", True)],
        [
            [
                info.name,
                str(info.dtype).removeprefix("torch."),
                shape_text(info.shape),
                size(info.nbytes),
            ]
            for module in contents.modules
            for info in module.tensors.values()
        ],
    )


def _print_scales(contents: Contents, all_tensors: bool) -> None:
    found = [
        (f"{module.name}.{local}" if local != module.name else local, scale)
        for module in contents.modules
        for local, scale in module.scales.items()
    ]
    if not found:
        return
    groups = (
        [(name, [(name, scale)]) for name, scale in found]
        if all_tensors
        else grouped(found, lambda pair: pair[0], lambda pair: None)
    )
    rows = []
    for label, members in groups:
        scales = [scale for _, scale in members]
        medians = sorted(s.median for s in scales if s.median is not None)
        bad = sum(s.non_finite + s.zero for s in scales)
        rows.append(
            [
                label,
                number(min((s.minimum for s in scales if s.minimum is not None), default=None)),
                number(medians[len(medians) // 2] if medians else None),
                number(max((s.maximum for s in scales if s.maximum is not None), default=None)),
                str(bad),
            ]
        )
    bad = sum(int(row[-1]) for row in rows)
    columns = [
        Column("scales"),
        Column("min", True),
        Column("median", True),
        Column("max", True),
        Column("bad", True),
    ]
    if not bad:  # omit a column of zeros: long names need the room
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    print_line()
    print_table(columns, rows)
    if bad:
        print_line(f"{bad} scales are zero or not finite: do not serve this checkpoint", "red")
