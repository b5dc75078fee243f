"""The model to quantize: a skeleton whose weights are in files, or a loaded module.

For a folder, the model class is built with its parameters on the meta device (buffers, such as
rotary frequencies, are real), and `loaded` fills one module at a time from the shards. A loaded
module already holds its weights.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, Parameter

from steelyard.checkpoint import CheckpointView, Shards
from steelyard.errors import PipelineError
from steelyard.model.file_modules import FilesModel
from steelyard.model.matching import name_as_files
from steelyard.model.model_class import ModelClass, NoModelClass
from steelyard.model.model_folder import model_folder
from steelyard.model.onloading import onloaded, take_over
from steelyard.model.placement import Placement, module_device
from steelyard.model.restoring import restored_on_error
from steelyard.model.skeleton import build_skeleton, parts_of
from steelyard.model.unstacking import Unstacked, unstack
from steelyard.model.untying import Untied, own_name, untie
from steelyard.model.weight_loading import WeightLoader
from steelyard.model.written_names import files_of, written_names

__all__ = ["Source"]


class Source:
    """A causal language model and its weights.

    model:  the skeleton, or the caller's module
    shards: the files behind the skeleton; None for a caller's module
    keys:   tensor of the model -> its name in the files
    joined: tensor of the model -> the names in the files that make it up, such as experts
    loaded_from: the files that a caller's module was loaded from, if they are still there
    """

    def __init__(
        self,
        model: Any,
        shards: CheckpointView | None = None,
        keys: dict[str, str] | None = None,
        joined: dict[str, list[str]] | None = None,
        loaded_from: Shards | None = None,
    ) -> None:
        self.model = model
        self.shards = shards
        self.keys = keys or {}
        self.joined = joined or {}
        self._stacks: list[Unstacked] = []  # of a loaded module
        self._untied: list[Untied] = []
        self.loaded_from = loaded_from
        self.place(Placement(module_device(model)))

    def place(self, placement: Placement) -> None:
        """Set the device that weights are loaded to."""
        self.placement = placement
        self.loader = WeightLoader(self._read, placement)

    @property
    def in_memory(self) -> bool:
        return all(p.device.type != "meta" for p in self.model.parameters())

    @classmethod
    def open(
        cls, model: Any, revision: str | None = None, trust_remote_code: bool = False
    ) -> Source:
        """Open a folder, a name on the hub, or a loaded module."""
        if isinstance(model, Module):
            _check_module(model)
            take_over(model)
            files = files_of(model)
            return cls(model, None, written_names(model, files), loaded_from=files)
        folder = model_folder(model, revision)
        shards = CheckpointView(folder)
        skeleton, keys, joined = build_skeleton(folder, shards, trust_remote_code)
        name_as_files(skeleton, keys)
        return cls(skeleton, shards, keys, joined)

    @classmethod
    def from_files(cls, model: str | Path, revision: str | None = None) -> Source:
        """Open a folder, or a name on the hub, without building its model class."""
        view = CheckpointView(model_folder(model, revision))
        return cls(FilesModel(view), view, {name: name for name in view.names()})

    # -- experts ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unstacked(self) -> Iterator[None]:
        """Replace stacked experts of a loaded module by Linear layers; an error undoes it.

        The skeleton of a folder has them from the start.
        """
        if self.shards is not None:
            yield
            return
        with restored_on_error(self.model):
            self._stacks = unstack(self.model)
            self.keys |= {own: name for stack in self._stacks for own, name in stack.keys.items()}
            name_as_files(self.model, self.keys)
            try:
                yield
            except BaseException:
                self.tie()
                raise
            del self.model.other_names

    def restack(self, quantized: Collection[str]) -> None:
        """Put back stacks of experts in which no expert is quantized.

        quantized: names of modules
        """
        if self.shards is not None:
            keys = {self.key(f"{name}.weight") for name in quantized}
            for stored in list(self.shards.stacks):
                if not keys.intersection(stored.experts):
                    self.shards.restack(stored)
        for stack in list(self._stacks):
            if not any(name.startswith(f"{stack.name}.") for name in quantized):
                stack.put_back()
                self._stacks.remove(stack)
                for own in stack.keys:
                    del self.keys[own]

    # -- tied heads ---------------------------------------------------------------------------

    def untie(self, heads: Mapping[str, str]) -> None:
        """Give heads a weight of their own, each tied to an embedding so far."""
        for head in heads.keys() - {each.name for each in self._untied}:
            embedding = heads[head]
            weight, stored = f"{head}.weight", self.key(f"{embedding}.weight")
            own, files = self.keys.get(weight, stored), self.shards or self.loaded_from
            if isinstance(self.model, FilesModel):
                own = weight
            elif own == stored or (files is not None and own not in files):
                own = own_name(self.model, head, embedding, stored)
            self.keys[weight] = own
            if self.shards is not None:
                self.shards.untie(own, stored)
            self._untied.append(untie(self.model, head))

    def tie(self) -> None:
        """Undo `untie` for a module of the caller's."""
        while self._untied and self.shards is None:
            self._untied.pop().put_back()

    @property
    def origin(self) -> Path | None:
        """The folder that the model is, or was, loaded from."""
        if self.shards is not None:
            return self.shards.folder
        folder = Path(getattr(self.model, "name_or_path", "") or "")
        return folder if str(folder) != "." and folder.is_dir() else None

    def config(self) -> dict[str, Any]:
        """Return the content of config.json: that of the files, or of the loaded model."""
        if self.shards is not None:
            return dict(self.shards.config)
        content: dict[str, Any] = json.loads(self.model.config.to_json_string(use_diff=False))
        content["architectures"] = content.get("architectures") or [type(self.model).__name__]
        content["dtype"] = str(self.dtype).removeprefix("torch.")
        return content

    @property
    def dtype(self) -> torch.dtype:
        """The most frequent floating-point type of the parameters."""
        sizes: dict[torch.dtype, int] = {}
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        return max(sizes, key=lambda dtype: sizes[dtype])

    def unknown(self) -> list[str]:
        """Return the tensors of the files that the model class does not have."""
        known = {*self.keys.values(), *(name for names in self.joined.values() for name in names)}
        if self.shards is not None:
            known |= {stack.name for stack in self.shards.restacked}
        return [] if self.shards is None else [n for n in self.shards.names() if n not in known]

    @functools.cached_property
    def _whole(self) -> ModelClass | None:
        """The class that config.json names, if the model is only a submodel of it; else None.

        For Mllama or Qwen3.5 with images, transformers builds the language model alone.
        """
        if self.shards is None or isinstance(self.model, FilesModel):
            return None
        named = self.shards.config.get("architectures")
        if not isinstance(named, list) or not named or type(self.model).__name__ in named:
            return None
        try:
            return ModelClass.of(self.shards.config, self.shards.names())
        except NoModelClass:
            return None

    def class_modules(self) -> dict[str, Module]:
        """Return the modules of the class that a server loads; none if it is not known."""
        if isinstance(self.model, FilesModel):
            return {} if self.model.known is None else self.model.known.modules
        return dict(self.model.named_modules()) if self._whole is None else self._whole.modules

    def class_name(self, name: str) -> str:
        """Return the name that the class in config.json has for a module of the model."""
        if isinstance(self.model, FilesModel):
            return self.model.other_names.get(name, name)
        whole = self._whole
        return name if whole is None else whole.module_name(self.module_key(name)) or name

    def key(self, name: str) -> str:
        """Return the name in the source of a tensor of the model."""
        if name in self.keys:
            return self.keys[name]
        module, _, leaf = name.rpartition(".")
        weight = self.keys.get(f"{module}.weight")
        if weight is None:  # attention modules have no weight: derive the name from a child's
            near = self._first_within.get(module)
            if near is None:
                return name
            return self.keys[near].removesuffix(near.removeprefix(f"{module}.")) + leaf
        return f"{weight.removesuffix('weight')}{leaf}"

    @functools.cached_property
    def _first_within(self) -> dict[str, str]:
        """Module -> the first tensor within it."""
        found: dict[str, str] = {}
        for key in self.keys:
            module = key.rpartition(".")[0]
            while module and module not in found:  # parents of a found one are found too
                found[module] = key
                module = module.rpartition(".")[0]
        return found

    def module_key(self, name: str) -> str:
        """Return the name in the source of a module with a weight."""
        return self.key(f"{name}.weight").removesuffix(".weight")

    @contextlib.contextmanager
    def loaded(
        self,
        module: Module,
        prefix: str,
        without: Module | None = None,
        skip: tuple[str, ...] = (),
    ) -> Iterator[None]:
        """Hold the weights of `module` on the device.

        without: a child whose modules are not loaded
        skip:    names of other modules that are not loaded
        """
        if self.shards is None:
            with onloaded(module, without):
                yield
            return
        excluded = set() if without is None else set(without.modules())
        with self.loader.loaded(module, prefix, excluded, skip):
            yield

    def _read(
        self, name: str, parameter: Parameter | None, looked_up: bool = False
    ) -> torch.Tensor | None:
        """Return a tensor of the model from the files; None if they do not hold it.

        looked_up: a few of its rows may be all that is used
        """
        assert self.shards is not None
        if name in self.keys:
            key = self.keys[name]
            return self.shards.mapped(key) if looked_up else self.shards.read(key)
        if name not in self.joined:
            return None
        assert parameter is not None
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        for original, part in parts_of(self.model, name, whole).items():
            part.copy_(self.shards.read(original))  # a view of the whole
        return whole


def _check_module(model: Any) -> None:
    if getattr(model, "config", None) is None:
        raise PipelineError(
            f"a {type(model).__name__} has no config, so it is not a transformers model; pass one "
            "loaded with AutoModelForCausalLM, or its folder"
        )
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            raise PipelineError(f"{name} is quantized already; load the original model again")
