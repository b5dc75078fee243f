"""Signs a checkpoint with a private key, through the package `model-signing`.

The signature covers every file but those that may change later, `provenance.json` included. It is a
Sigstore bundle, `model.sig`, which `model_signing verify key` reads too.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from steelyard.checkpoint.provenance import MUTABLE, SIGNATURE
from steelyard.errors import CheckpointError
from steelyard.foreign import reason_of

__all__ = ["sign_checkpoint", "signature_problem"]


def sign_checkpoint(folder: Path, key: Path) -> Path:
    """Sign a checkpoint; return the path of the signature.

    key: an elliptic-curve private key in PEM form, without a password
    """
    signing, hashing = _module("signing"), _module("hashing")
    hashed = hashing.Config().set_ignored_paths(paths=(*MUTABLE, SIGNATURE))
    target = folder / SIGNATURE
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=key)
        signer.set_hashing_config(hashed).sign(folder, target)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder} cannot be signed with {key} ({reason_of(error)}); give an elliptic-curve "
            "private key in PEM form, such as `openssl ecparam -name prime256v1 -genkey -noout` "
            "prints"
        ) from None
    return target


def signature_problem(folder: Path, key: Path) -> str | None:
    """Return why the signature of a checkpoint is not that of a key; None if it is.

    key: the public key in PEM form
    """
    verifying = _module("verifying")
    if not (folder / SIGNATURE).is_file():
        return f"there is no {SIGNATURE}: the checkpoint is not signed"
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=key)
        verifier.verify(folder, folder / SIGNATURE)
    except Exception as error:  # an invalid signature raises errors of several libraries
        return f"{SIGNATURE} is not valid for {key}: {reason_of(error) or type(error).__name__}"
    return None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError as error:
        raise CheckpointError(
            f"signatures need the package model-signing ({reason_of(error)}); run "
            "`pip install 'steelyard[sign]'`"
        ) from None
