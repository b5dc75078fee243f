"""Finds targets and ignores of a recipe that match no module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from compressed_tensors.utils.match import is_match
from torch.nn import Linear, Module

__all__ = ["misspelled_ignores", "nothing_quantized", "unmatched_targets", "unused_ignores"]

# Recipes are copied between models, and name parts that not every model has.
_USUAL = {
    *("lm_head", "embed_tokens", "embed_out"),
    *("gate", "router", "shared_expert_gate", "linear_attn", "mtp"),
    *("visual", "vision_tower", "vision_model", "vision_embed_tokens", "audio_tower"),
    *("multi_modal_projector", "connector"),
}
_AROUND = {"model", "language_model", "mlp", "block_sparse_moe", "feed_forward"}
_HEADLESS = "the model has no output head of that name"
_LETTERS = 3  # shorter pieces of a name, such as q and k, are too much alike
_WORD = re.compile(r"[A-Za-z_]\w*")


def unmatched_targets(
    modules: Mapping[str, Module], targets: Iterable[str], of: str = ""
) -> Iterator[str]:
    """Yield an error for every target that matches no module."""
    for target in targets:
        if not _matches(modules, target):
            meant = _HEADLESS if _is_head(target) else _meant(modules, target)
            yield f"the target {target!r}{of} matches no module: {meant or 'check its spelling'}"


def misspelled_ignores(
    modules: Mapping[str, Module],
    patterns: Iterable[str],
    quantized: Collection[str] | None = None,
) -> Iterator[str]:
    """Yield an error for every ignore that matches no module and is almost a name in the model.

    quantized: names of the modules to quantize; the near name of an embedding or norm that is not
               among them is no error

    >>> list(misspelled_ignores({"lm_head": Module()}, ["lm_head", "re:.*mlp.gate$", "lm_haed"]))
    ["'lm_haed' in ignore matches no module: did you mean 'lm_head'?, or remove it"]
    """
    for pattern in _unmatched_ignores(modules, patterns):
        if meant := _mistake(modules, pattern, quantized):
            yield f"{pattern!r} in ignore matches no module: {meant}, or remove it"


def unused_ignores(
    modules: Mapping[str, Module],
    patterns: Iterable[str],
    quantized: Collection[str] | None = None,
) -> Iterator[str]:
    """Yield a warning with the ignores that match no module, and no name of one to quantize nearly.

    Scripts for a family of models ignore parts that only some of them have.
    """
    unused = [
        repr(pattern)
        for pattern in _unmatched_ignores(modules, patterns)
        if not _mistake(modules, pattern, quantized)
    ]
    if unused:
        yield f"{', '.join(unused)} in ignore: the model has no such module"


def nothing_quantized(model: Any) -> str:
    """Return an error for a recipe that quantizes nothing, with the reason if known."""
    known = getattr(getattr(model, "known", None), "model", model)  # the class, for bare files
    if any(type(module).__name__ == "Conv1D" for module in known.modules()):
        return (
            f"nothing would be quantized: the layers of {type(known).__name__} are Conv1D, which "
            "compressed-tensors does not store"
        )
    return "nothing would be quantized"


def _unmatched_ignores(modules: Mapping[str, Module], patterns: Iterable[str]) -> Iterator[str]:
    for pattern in dict.fromkeys(patterns):
        if not _is_usual(pattern) and not _matches(modules, pattern):
            yield pattern


def _mistake(
    modules: Mapping[str, Module], pattern: str, quantized: Collection[str] | None
) -> str | None:
    """Return what was meant by an ignore that matches nothing; None if that changes nothing."""
    close = _nearest(modules, pattern)
    if close is None:
        return _misspelled(modules, pattern)
    matters = quantized is None or any(
        (is_match(name, module, close) or f".{close}." in f".{name}.")
        and (isinstance(module, Linear) or name in quantized)
        for name, module in modules.items()
    )
    return f"did you mean {close!r}?" if matters else None


def _words(pattern: str) -> list[str]:
    return _WORD.findall(pattern.removeprefix("re:").replace("\\", " "))


def _is_usual(pattern: str) -> bool:
    words = set(_words(pattern))
    return bool(words & _USUAL) and words <= _USUAL | _AROUND


def _is_head(pattern: str) -> bool:
    return _words(pattern)[-1:] == ["lm_head"]


def _misspelled(modules: Mapping[str, Module], pattern: str) -> str | None:
    """Ask to check the spelling if a word of a pattern is one slip away from a known one."""
    known = {part for name in modules for part in name.split(".")} | _USUAL | _AROUND
    pieces = {piece.rstrip("s") for part in known for piece in part.split("_")}
    for word in _words(pattern):
        if all(piece.rstrip("s") in pieces for piece in word.split("_")):  # expert for experts too
            continue
        if any(_is_slip(word, part) for part in known):
            return "check its spelling"
    return None


def _is_slip(word: str, name: str) -> bool:
    """Whether a word is a name with a letter dropped, added, replaced or swapped with the next.

    >>> _is_slip("lm_haed", "lm_head"), _is_slip("q_a_proj", "q_proj"), _is_slip("k_proj", "v_proj")
    (True, False, False)
    """
    pieces, parts = word.split("_"), name.split("_")
    different = [(a, b) for a, b in zip(pieces, parts, strict=False) if a != b]
    if len(pieces) != len(parts) or len(different) != 1:
        return False
    one, other = different[0]
    if min(len(one), len(other)) < _LETTERS:
        return False
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    start = min(len(one), len(other)) if start is None else start
    a, b = one[start:], other[start:]
    return a[1:] in (b, b[1:]) or b[1:] == a or (a[:2] == b[1::-1] and a[2:] == b[2:])


def _matches(modules: Mapping[str, Module], pattern: str) -> bool:
    return any(is_match(name, module, pattern) for name, module in modules.items())


def _meant(modules: Mapping[str, Module], pattern: str) -> str | None:
    """Suggest the nearest class, or last part of a name, for a target that is not a pattern."""
    close = _nearest(modules, pattern)
    return None if close is None else f"did you mean {close!r}?"


def _nearest(modules: Mapping[str, Module], pattern: str) -> str | None:
    if pattern.startswith("re:"):
        return None
    known = {type(module).__name__ for module in modules.values()} | {"lm_head"}
    known |= {name if "." in pattern else name.rpartition(".")[2] for name in modules}
    close = difflib.get_close_matches(pattern, sorted(known), n=1, cutoff=0.8)
    return close[0] if close else None
