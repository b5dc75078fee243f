"""Unties an output head from the embedding, so that the head can be quantized alone.

A tied pair is one weight, and the embedding needs it as it is. So the quantized head is stored
beside the embedding, and config.json says `tie_word_embeddings: false`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from steelyard.checkpoint.config_file import untied_config
from steelyard.model.model_class import NoModelClass, build, tied_modules
from steelyard.model.skeleton import saved_as

__all__ = ["Untied", "own_name", "tied_heads", "untie", "untying_problem"]

_ALWAYS_TIED = frozenset({"lfm2", "lfm2_moe", "whisper", "zamba2"})
_ALWAYS_TIED |= {"cohere", "cohere2", "cohere2_moe", "gemma2", "gemma3n", "gemma3n_text"}
# model types whose logits vLLM 0.32 computes with the embedding, whatever config.json says


@dataclass(frozen=True)
class Untied:
    """A head that has a weight of its own.

    weight:   the one that it shared with the embedding
    settings: configs with the value that `tie_word_embeddings` had
    """

    model: Any
    name: str
    weight: Parameter
    tied_to: str
    settings: list[tuple[Any, Any]]

    def put_back(self) -> None:
        """Tie the pair again."""
        self.model.get_submodule(self.name)._parameters["weight"] = self.weight
        self.model.all_tied_weights_keys[f"{self.name}.weight"] = self.tied_to
        for config, before in self.settings:
            config.tie_word_embeddings = before


def tied_heads(model: Any) -> dict[str, str]:
    """Return module -> the module whose weight it takes over."""
    pairs = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {
        head.removesuffix(".weight"): other.removesuffix(".weight")
        for head, other in pairs.items()
        if head.endswith(".weight") and other.endswith(".weight")
    }


def untying_problem(model: Any) -> str | None:
    """Return why the head of a model cannot have a weight of its own; None if it can."""
    known = getattr(model, "known", None)
    if known is None and hasattr(model, "known"):
        return f"{model.unknown}, so that nothing tells how they are tied"
    owner: Any = model if known is None else known.model
    pairs = list(getattr(owner, "all_tied_weights_keys", None) or {})
    if len(pairs) > 1:
        other = next((name for name in pairs if "lm_head" not in name), pairs[0])
        return f"{other} is tied as well, and config.json can only untie them all"
    config = _settings_of(owner)
    kinds = {config.get("model_type"), (config.get("text_config") or {}).get("model_type")}
    if always := sorted(map(str, kinds & _ALWAYS_TIED)):
        return f"vLLM computes the logits of a {always[0]} with the embedding in any case"
    try:
        made = build(untied_config(config))
    except NoModelClass as error:
        return str(error)
    return f"{type(made).__name__} ties them in any case" if tied_modules(made) else None


def untie(model: Any, name: str) -> Untied:
    """Give a head a weight of its own; it shares the memory of the embedding until it is solved."""
    module = model.get_submodule(name)
    weight = module._parameters["weight"]
    module._parameters["weight"] = Parameter(weight.detach(), weight.requires_grad)
    tied_to = model.all_tied_weights_keys.pop(f"{name}.weight")
    config = model.config
    parts = {id(part): part for part in (config, config.get_text_config())}
    tied = [part for part in parts.values() if hasattr(part, "tie_word_embeddings")]
    settings = [(part, part.tie_word_embeddings) for part in tied]
    for part in tied:
        part.tie_word_embeddings = False
    return Untied(model, name, weight, tied_to, settings)


def own_name(model: Any, head: str, embedding: str, stored: str) -> str:
    """Return the name in files of a head's own weight.

    stored: that of the embedding's weight
    """
    if stored == f"{embedding}.weight":  # the files have the names of the class
        return f"{head}.weight"
    try:
        made = build(_settings_of(model))  # a loaded model knows only names that it was loaded from
    except NoModelClass:
        made = model
    return next(iter(saved_as(made, {f"{head}.weight": torch.empty(1, 1, device="meta")})))


def _settings_of(model: Any) -> dict[str, Any]:
    """Return what config.json would hold for a model."""
    content: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {**content, "architectures": [type(model).__name__]}
