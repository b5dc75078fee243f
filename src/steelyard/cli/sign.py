"""`steelyard sign`: signs a checkpoint with a private key, or verifies its signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import options
from steelyard.cli.mistakes import FAILED
from steelyard.cli.terminal import print_document, print_line

__all__ = ["sign"]


def sign(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            callback=options.existing_model,
            help="A folder with a quantized model.",
        ),
    ],
    key: Annotated[
        Path,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Private key (PEM, elliptic curve); with --verify, the public key.",
            show_default=False,
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the signature instead of signing.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Sign a checkpoint, or verify its signature.

    The signature is model.sig; it covers all files but the report, README.md and .gitattributes.
    Needs the package model-signing. Exits with 1 if the signature is not valid.

    \b
    Examples:
      steelyard sign model-FP8 --key key.pem
      steelyard sign model-FP8 --key public.pem --verify
    """
    from steelyard.checkpoint.signing import sign_checkpoint, signature_problem

    folder = Path(checkpoint)
    if not key.is_file():
        raise typer.BadParameter(f"there is no file {str(key)!r}", param_hint="--key")
    problem = signature_problem(folder, key) if verify else None
    signature = None if verify else sign_checkpoint(folder, key)
    if json:
        made = None if signature is None else str(signature)
        print_document("sign", {"checkpoint": checkpoint, "signature": made, "problem": problem})
    elif problem is not None:
        print_line(f"problem: {problem}", "red")
    else:
        print_line(f"{folder} has a valid signature" if verify else f"signature: {signature}")
    if problem is not None:
        raise typer.Exit(FAILED)
