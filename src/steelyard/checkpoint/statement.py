"""The form of `provenance.json`: an in-toto statement, as OpenSSF model signing defines it.

    {"_type": "https://in-toto.io/Statement/v1",
     "subject": [{"name": "_", "digest": {"sha256": <digest of all digests>}}],
     "predicateType": "https://model_signing/signature/v1.0",
     "predicate": {"serialization": {...}, "resources": [{"name", "algorithm", "digest"}, ...],
                   "steelyard": {...}}}

`resources` are the files in alphabetical order; the subject's digest is the SHA-256 of their binary
digests in that order. Verifiers ignore further fields of the predicate, such as ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["content_of", "statement_of"]

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_OWN = "steelyard"


def statement_of(
    digests: Mapping[str, str], ignored: Iterable[str], content: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the statement on files.

    digests: name of each file -> its SHA-256 in hexadecimal digits
    ignored: files that are not covered
    content: our own part of the predicate
    """
    return {
        "_type": TYPE,
        "subject": [{"name": "_", "digest": {"sha256": _root(digests)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": sorted(ignored),
            },
            "resources": [
                {"name": name, "algorithm": "sha256", "digest": digests[name]}
                for name in sorted(digests)
            ],
            _OWN: dict(content),
        },
    }


def content_of(statement: object) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the digests of the files and our own part; raise ValueError if they contradict."""
    if not isinstance(statement, dict) or statement.get("_type") != TYPE:
        raise ValueError(f"it is no in-toto statement: its _type is not {TYPE}")
    if statement.get("predicateType") != PREDICATE_TYPE:
        raise ValueError(f"its predicateType is not {PREDICATE_TYPE}")
    try:
        predicate = statement["predicate"]
        digests = {each["name"]: each["digest"] for each in predicate["resources"]}
        own = predicate[_OWN]
        (subject,) = statement["subject"]
        root = _root(digests)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it lacks a part of the statement ({error!r})") from None
    if not isinstance(own, dict):
        raise ValueError(f"its predicate has no object {_OWN!r}")
    if subject != {"name": "_", "digest": {"sha256": root}}:
        raise ValueError("the digest of its subject is not that of its resources")
    return digests, own


def _root(digests: Mapping[str, str]) -> str:
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(bytes.fromhex(digests[name]))
    return whole.hexdigest()
