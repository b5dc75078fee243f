"""Finds targets and ignores of a recipe that match no module."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from compressed_tensors.utils.match import is_match
from torch.nn import Module

__all__ = ["nothing_quantized", "unmatched_ignores", "unmatched_targets"]

# Recipes are copied between models, and name parts that not every model has.
_USUAL = {
    *("lm_head", "embed_tokens", "embed_out"),
    *("gate", "router", "shared_expert_gate", "linear_attn", "mtp"),
    *("visual", "vision_tower", "vision_model", "vision_embed_tokens", "audio_tower"),
    *("multi_modal_projector", "connector"),
}
_AROUND = {"model", "language_model", "mlp", "block_sparse_moe", "feed_forward"}
_HEADLESS = "the model has no output head of that name"
_WORD = re.compile(r"[A-Za-z_]\w*")


def unmatched_targets(
    modules: Mapping[str, Module], targets: Iterable[str], of: str = ""
) -> Iterator[str]:
    """Yield an error for every target that matches no module."""
    for target in targets:
        if not _matches(modules, target):
            meant = _HEADLESS if _is_head(target) else _meant(modules, target)
            yield f"the target {target!r}{of} matches no module: {meant or 'check its spelling'}"


def unmatched_ignores(modules: Mapping[str, Module], patterns: Iterable[str]) -> Iterator[str]:
    """Yield an error for every ignore that matches no module, except the usual ones.

    >>> list(unmatched_ignores({}, ["lm_head", "re:.*mlp.gate$", "lm_haed"]))
    ["'lm_haed' in ignore matches no module: check its spelling, or remove it"]
    """
    for pattern in dict.fromkeys(patterns):
        if not _is_usual(pattern) and not _matches(modules, pattern):
            meant = _meant(modules, pattern) or "check its spelling"
            yield f"{pattern!r} in ignore matches no module: {meant}, or remove it"


def nothing_quantized(model: Any) -> str:
    """Return an error for a recipe that quantizes nothing, with the reason if known."""
    known = getattr(getattr(model, "known", None), "model", model)  # the class, for bare files
    if any(type(module).__name__ == "Conv1D" for module in known.modules()):
        return (
            f"nothing would be quantized: the layers of {type(known).__name__} are Conv1D, which "
            "compressed-tensors does not store"
        )
    return "nothing would be quantized"


def _is_usual(pattern: str) -> bool:
    words = set(_WORD.findall(pattern.removeprefix("re:").replace("\\", " ")))
    return bool(words & _USUAL) and words <= _USUAL | _AROUND


def _is_head(pattern: str) -> bool:
    return _WORD.findall(pattern.removeprefix("re:").replace("\\", " "))[-1:] == ["lm_head"]


def _matches(modules: Mapping[str, Module], pattern: str) -> bool:
    return any(is_match(name, module, pattern) for name, module in modules.items())


def _meant(modules: Mapping[str, Module], pattern: str) -> str | None:
    """Suggest the nearest class, or last part of a name, for a target that is not a pattern."""
    if pattern.startswith("re:"):
        return None
    known = {type(module).__name__ for module in modules.values()} | {"lm_head"}
    known |= {name if "." in pattern else name.rpartition(".")[2] for name in modules}
    close = difflib.get_close_matches(pattern, sorted(known), n=1, cutoff=0.8)
    return f"did you mean {close[0]!r}?" if close else None
