"""Modules inferred from a checkpoint's files, for models whose class is not needed or not known.

A two-dimensional `weight` is that of a Linear unless its name says that it is an embedding, a
router or a norm, or its bias shows that it is stored the other way round. Names are all there is to
go by: what was inferred is in the plan, and a recipe may target or ignore any module by name.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Embedding, Linear, Module, Parameter

from steelyard.checkpoint.view import CheckpointView

__all__ = ["FilesModel"]

_EMBEDDING = re.compile(r"embed|^wte$|^wpe$|relative_attention_bias")
_ROUTER = re.compile(r"^(gate|router|wg|shared_expert_gate)$")
_NORM = re.compile(r"norm|^ln_?\d*$|^ln_")
_TURNED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}  # whose Linear is a Conv1D
_TURNED_LEAF = re.compile(r"^(c_attn|c_proj|c_fc|q_attn)$")


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Router(Module):
    """Sends tokens to experts; a small matrix that decides much."""


class Norm(Module):
    """Scales and shifts."""


class Conv1D(Module):
    """A linear layer whose weight is stored as (in, out)."""


class Other(Module):
    """Holds tensors that are no weight of a Linear."""


class FilesModel(Module):
    """A tree of modules on the meta device, named and shaped as the tensors of a checkpoint."""

    def __init__(self, view: CheckpointView) -> None:
        super().__init__()
        text = view.text_config
        sizes = SimpleNamespace(
            num_hidden_layers=_count(text.get("num_hidden_layers")),
            hidden_size=_count(text.get("hidden_size")),
        )
        self.config = SimpleNamespace(get_text_config=lambda: sizes)
        self.all_tied_weights_keys = _tied(view)
        for name in view.names():
            *path, leaf = name.split(".")
            self._place(path, view, name)._parameters[leaf] = _parameter(view, name)

    def _place(self, path: list[str], view: CheckpointView, name: str) -> Module:
        """Return the module that a tensor belongs to; its children are made as they come."""
        node: Module = self
        for depth, part in enumerate(path):
            child = node._modules.get(part)
            if child is None:  # not `add_module`, which refuses names such as "config"
                prefix = ".".join(path[: depth + 1])
                child = node._modules[part] = _class_of(view, prefix, part)
            node = child
        return node


def _class_of(view: CheckpointView, prefix: str, leaf: str) -> Module:
    weight = f"{prefix}.weight"
    if weight not in view or len(shape := view.info(weight).shape) != 2:
        return Other()
    if view.info(weight).dtype not in _FLOATS:
        return Other()  # codes of some other format
    if _EMBEDDING.search(leaf):
        return Embedding(1, 1, device="meta")
    if _ROUTER.search(leaf) or ".router." in f".{prefix}.":
        return Router()
    if _NORM.search(leaf):
        return Norm()
    if view.config.get("model_type") in _TURNED and _TURNED_LEAF.search(leaf):
        return Conv1D()
    bias = view.info(f"{prefix}.bias").shape if f"{prefix}.bias" in view else (shape[0],)
    if bias != (shape[0],):
        return Conv1D() if bias == (shape[1],) else Other()
    return Linear(1, 1, bias=False, device="meta")


def _parameter(view: CheckpointView, name: str) -> Parameter:
    info = view.info(name)
    return Parameter(torch.empty(info.shape, dtype=info.dtype, device="meta"), requires_grad=False)


def _tied(view: CheckpointView) -> dict[str, str]:
    """Return an output projection that is stored although it is the embedding."""
    tied = view.config.get("tie_word_embeddings", view.text_config.get("tie_word_embeddings"))
    heads = [n for n in view.names() if n.endswith("lm_head.weight")]
    embeddings = [n for n in view.names() if n.endswith(("embed_tokens.weight", "wte.weight"))]
    if tied is True and heads and embeddings:
        return {heads[0]: embeddings[0]}
    return {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
