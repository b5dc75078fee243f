"""Options of a bit budget."""

from __future__ import annotations

from typing import Annotated, Any

import typer

__all__ = ["BitWidths", "Bits", "MaxKl", "budget_from"]


def _widths(value: str | None) -> str | None:
    try:
        [int(each) for each in (value or "8").split(",")]
    except ValueError:
        raise typer.BadParameter(f"{value!r} is no list of numbers such as 4,5,6,8,16") from None
    return value


Bits = Annotated[
    float | None,
    typer.Option(
        "--bits",
        metavar="N",
        help="Bits of a weight on average, such as 4.5: modules that the model is most sensitive "
        "to get more, the others those of --scheme (W4A16 unless given). Scales are not counted.",
        show_default=False,
    ),
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        metavar="X",
        help="The fewest bits with this KL divergence, such as 0.05, instead of --bits.",
        show_default=False,
    ),
]
BitWidths = Annotated[
    str | None,
    typer.Option(
        "--bit-widths",
        metavar="LIST",
        callback=_widths,
        help="Bits that --bits and --max-kl choose from; 16 is unquantized. vLLM serves 2, 3, 5, 6 "
        "and 7 bits on CUDA alone: 4,8,16 is served everywhere.",
        show_default="for W4A16: 4,5,6,8,16",
    ),
]


def budget_from(
    bits: float | None, max_kl: float | None, bit_widths: str | None
) -> dict[str, Any] | None:
    """Return the options of a bit budget; None if none is asked for."""
    if bits is not None and max_kl is not None:
        raise typer.BadParameter("--bits and --max-kl exclude each other: give one of them")
    given: dict[str, Any] = {"bits": bits, "max_kl": max_kl}
    if bit_widths is not None:
        if bits is None and max_kl is None:
            raise typer.BadParameter("--bit-widths needs --bits or --max-kl, such as --bits 4.5")
        given["bit_widths"] = [int(each) for each in bit_widths.split(",")]
    found = {name: value for name, value in given.items() if value is not None}
    return found or None
