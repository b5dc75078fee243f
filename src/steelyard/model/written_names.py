"""The names under which the tensors of a loaded module are written.

They are those of the files that the module was loaded from; without files, those that transformers'
`save_pretrained` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint import Shards
from steelyard.errors import SteelyardError
from steelyard.model.model_class import ModelClass
from steelyard.model.skeleton import saved_as

__all__ = ["as_stored", "files_of", "written_names"]


def files_of(model: Any) -> Shards | None:
    """Return the files that a module was loaded from, if they are still there."""
    folder = Path(getattr(model, "name_or_path", "") or "")
    if str(folder) == "." or not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    try:
        return Shards(folder)
    except SteelyardError:  # damaged or changed, and not needed
        return None


def written_names(model: Any, files: Shards | None) -> dict[str, str]:
    """Return tensor of the module -> its name in files, for tensors that are written unchanged.

    Excludes tensors that transformers concatenates or splits, such as stacked experts.
    """
    tensors = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    of = {id(tensor): name for name, tensor in tensors.items()}
    saved = {of[id(t)]: name for name, t in saved_as(model, tensors).items() if id(t) in of}
    if files is None or set(saved.values()) <= set(files.names()):
        return saved
    stored = ModelClass(model, files.names()).file_names()
    return {name: stored.get(name, new) for name, new in saved.items()}


def as_stored(tensor: torch.Tensor, name: str, files: Shards | None) -> torch.Tensor:
    """Return a tensor in the type of the files it was loaded from, where that loses nothing.

    transformers loads some parameters in fp32, whatever the files hold.
    """
    if files is None or name not in files or tensor.dtype == files.info(name).dtype:
        return tensor
    stored = tensor.to(files.info(name).dtype)
    return stored if torch.equal(stored.to(tensor.dtype), tensor) else tensor
