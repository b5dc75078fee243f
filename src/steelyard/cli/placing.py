"""Options that say where to compute, and where to keep what is computed."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.known import completing, one_of
from steelyard.names import ACTIVATIONS

__all__ = ["Activations", "Device"]


def _activations(value: str) -> str:
    return one_of("place", value, ACTIVATIONS)


Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where to compute: cpu, or an accelerator such as cuda, cuda:1 or xpu; auto takes the "
        "accelerator if there is one.",
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        "--activations",
        metavar="PLACE",
        callback=_activations,
        autocompletion=completing(lambda: ACTIVATIONS),
        help="Where hidden states are kept between two layers: device, host (memory) or disk "
        "(files in TMPDIR); auto takes the first with room.",
    ),
]
