"""Builds the module tree of a checkpoint from its tensors, for recipes that never run the model.

Where transformers has the model class, the class decides what each tensor belongs to. Otherwise,
and for tensors outside the class, the type is inferred from the name: a 2-D `weight` belongs to a
Linear unless the name says embedding, router or norm, or the shape of the bias implies a transposed
weight. The plan lists the inferred modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Embedding, Linear, Module, Parameter

from steelyard.checkpoint.view import CheckpointView
from steelyard.model.matching import is_router
from steelyard.model.model_class import ModelClass, NoModelClass
from steelyard.model.unstacking import expert_names
from steelyard.model.untying import own_name

__all__ = ["FilesModel", "untie_as_written"]

_EMBEDDING = re.compile(r"embed|^wte$|^wpe$|relative_attention_bias")
_NORM = re.compile(r"norm|^ln_?\d*$|^ln_")
_TRANSPOSED = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}  # Conv1D for Linear
_TRANSPOSED_LEAF = re.compile(r"^(c_attn|c_proj|c_fc|q_attn)$")


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Router(Module):
    """Routes tokens to experts; small, and sensitive to quantization."""


class Norm(Module):
    """A normalization layer."""


class Conv1D(Module):
    """A linear layer that stores its weight as (in, out)."""


class Other(Module):
    """A module of any other type."""


class FilesModel(Module):
    """A tree of modules on the meta device, with the names and shapes of a checkpoint's tensors.

    known:       the transformers class; None if there is none, and `unknown` says why
    class_names: module of the files -> its name in the class
    other_names: the same, with experts that the class stacks
    """

    def __init__(self, view: CheckpointView) -> None:
        super().__init__()
        text = view.text_config
        sizes = SimpleNamespace(
            num_hidden_layers=_count(text.get("num_hidden_layers")),
            hidden_size=_count(text.get("hidden_size")),
        )
        self.config = SimpleNamespace(get_text_config=lambda: sizes)
        self.known: ModelClass | None = None
        self.unknown = ""
        stacks = [stack.name for stack in view.stacks]  # the view splits these
        try:
            self.known = ModelClass.of(view.config, [*view.names(), *stacks])
        except NoModelClass as error:
            self.unknown = str(error)
        self._cut = {
            weight
            for stack in view.stacks
            if self.known is not None and stack.name in self.known.places
            for weight in stack.experts
        }
        self.class_names = {} if self.known is None else _class_names(self.known)
        self.all_tied_weights_keys = _tied(view, self.known)
        for name in view.names():
            *path, leaf = name.split(".")
            self._place(path, view, name)._parameters[leaf] = _parameter(view, name)
        self._add_tied_heads(view)
        self.other_names = {**self.class_names, **_experts(view, self.known)}
        head = None if self.known is None else self.known.head
        self._head = next((file for file, own in self.class_names.items() if own == head), None)

    def _place(self, path: list[str], view: CheckpointView, name: str) -> Module:
        """Return the module that a tensor belongs to, and create its parents as needed."""
        node: Module = self
        for depth, part in enumerate(path):
            child = node._modules.get(part)
            if child is None:  # not `add_module`, which refuses names such as "config"
                prefix = ".".join(path[: depth + 1])
                child = node._modules[part] = _class_of(view, prefix, part, self.known)
            node = child
        return node

    def _add_tied_heads(self, view: CheckpointView) -> None:
        """Add heads that are in no file, since their weight is the embedding's."""
        own_names = _own_names(self.known)
        for name, other in self.all_tied_weights_keys.items():
            own = own_names.get(name, name).removesuffix(".weight")
            linear = self.known is None or self.known.is_linear(own)
            if name in view or other not in view or not linear:
                continue
            *path, leaf = name.removesuffix(".weight").split(".")
            parent = self._place(path, view, name)
            if leaf not in parent._modules:
                head = parent._modules[leaf] = Linear(1, 1, bias=False, device="meta")
                head._parameters["weight"] = self.get_parameter(other)
                if self.known is not None:
                    self.class_names[name.removesuffix(".weight")] = own

    def get_output_embeddings(self) -> Module | None:
        """Return the output head; None if the class does not name it."""
        return None if self._head is None else self.get_submodule(self._head)

    def inferred(self, name: str) -> bool:
        """Whether the type of a module is inferred from its name."""
        known = self.known
        if known is None:
            return True
        weight = f"{name}.weight"
        places = (known.places, known.converted, self._cut)
        return name not in self.class_names and not any(weight in names for names in places)


def _class_of(view: CheckpointView, prefix: str, leaf: str, known: ModelClass | None) -> Module:
    weight = f"{prefix}.weight"
    if weight not in view or len(shape := view.info(weight).shape) != 2:
        return Other()
    if view.info(weight).dtype not in _FLOATS:
        return Other()  # codes of some other format
    if known is not None and weight in known.places:
        return _class_in(known, known.places[weight].rpartition(".")[0], leaf)
    if _EMBEDDING.search(leaf):
        return Embedding(1, 1, device="meta")
    if is_router(prefix):
        return Router()
    if _NORM.search(leaf):
        return Norm()
    if view.config.get("model_type") in _TRANSPOSED and _TRANSPOSED_LEAF.search(leaf):
        return Conv1D()
    bias = view.info(f"{prefix}.bias").shape if f"{prefix}.bias" in view else (shape[0],)
    if bias != (shape[0],):
        return Conv1D() if bias == (shape[1],) else Other()
    return Linear(1, 1, bias=False, device="meta")


def _class_in(known: ModelClass, name: str, leaf: str) -> Module:
    """Return a module of the same kind as in the class; other types keep their class name."""
    module = known.modules[name]
    if isinstance(module, Embedding):
        return Embedding(1, 1, device="meta")
    if is_router(leaf):
        return Router()
    if known.is_linear(name):
        return Linear(1, 1, bias=False, device="meta")
    stand_in: Module = type(type(module).__name__, (Module,), {})()
    return stand_in


def _class_names(known: ModelClass) -> dict[str, str]:
    """Return module of the files -> its name in the class."""
    weights = [name.removesuffix(".weight") for name in known.places if name.endswith(".weight")]
    pairs = ((name, known.module_name(name)) for name in weights)
    return {name: own for name, own in pairs if own is not None}


def _experts(view: CheckpointView, known: ModelClass | None) -> dict[str, str]:
    """Return expert of the files -> the name that it has when the class runs unstacked."""
    if known is None or not known.converted:
        return {}
    names = expert_names(known.model).items()
    pairs = {file: own for own, file in names if file in view and own.endswith(".weight")}
    return {f.removesuffix(".weight"): own.removesuffix(".weight") for f, own in pairs.items()}


def _parameter(view: CheckpointView, name: str) -> Parameter:
    info = view.info(name)
    return Parameter(torch.empty(info.shape, dtype=info.dtype, device="meta"), requires_grad=False)


def _tied(view: CheckpointView, known: ModelClass | None) -> dict[str, str]:
    """Return tied tensors, under their names in the files, or those that they would have there."""
    if known is not None:
        files = known.file_names()
        own = {class_name: name for name, class_name in _own_names(known).items()}
        pairs = dict(getattr(known.model, "all_tied_weights_keys", None) or {})
        return {own.get(str(a), str(a)): files.get(str(b), str(b)) for a, b in pairs.items()}
    tied = view.config.get("tie_word_embeddings", view.text_config.get("tie_word_embeddings"))
    heads = [n for n in view.names() if n.endswith("lm_head.weight")] or ["lm_head.weight"]
    embeddings = [n for n in view.names() if n.endswith(("embed_tokens.weight", "wte.weight"))]
    return {heads[0]: embeddings[0]} if tied is True and embeddings else {}


def _own_names(known: ModelClass | None) -> dict[str, str]:
    """Return the names in files of tied tensors -> their names in the class."""
    if known is None:
        return {}
    files = known.file_names()
    found: dict[str, str] = {}
    for name, other in dict(getattr(known.model, "all_tied_weights_keys", None) or {}).items():
        if name in files:
            found[files[name]] = name
        elif other in files:
            head, embedding = name.removesuffix(".weight"), other.removesuffix(".weight")
            found[own_name(known.model, head, embedding, files[other])] = name
    return found


def untie_as_written(view: CheckpointView, held: Collection[str]) -> None:
    """Untie the heads of a source that a checkpoint made of it holds beside the embedding.

    held: modules of the checkpoint that are quantized, or have a weight of their own
    """
    for name, other in FilesModel(view).all_tied_weights_keys.items():
        if name.removesuffix(".weight") in held and other in view:
            view.untie(name, other)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
