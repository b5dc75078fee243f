"""Hidden states of batches in files, so that a run can resume between two layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open

from steelyard.atomic_file import sync
from steelyard.checkpoint.tensor_file import save_tensors
from steelyard.errors import CheckpointError
from steelyard.model.blocks import Batch

__all__ = ["load_hidden", "save_hidden"]

_ORIGINAL = ".original"


def save_hidden(batches: Mapping[int, Batch], path: Path) -> None:
    """Write the hidden states of batches, and sync the file to disk.

    batches: by index among all batches of the run
    """
    states = {str(i): batch.hidden.contiguous() for i, batch in batches.items()}
    for i, batch in batches.items():
        if batch.original is not None:
            states[f"{i}{_ORIGINAL}"] = batch.original.contiguous().clone()
    save_tensors(states, path)
    sync(path)


def load_hidden(batches: Mapping[int, Batch], paths: Iterable[Path]) -> None:
    """Read hidden states from the files of all ranks; raise if a batch is missing."""
    missing = {str(i) for i in batches}
    missing |= {f"{i}{_ORIGINAL}" for i, batch in batches.items() if batch.original is not None}
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in missing.intersection(file.keys()):
                number = name.removesuffix(_ORIGINAL)
                batch, hidden = batches[int(number)], file.get_tensor(name)
                if hidden.shape != batch.hidden.shape:
                    raise CheckpointError(
                        f"{path} has hidden states of shape {tuple(hidden.shape)} for batch "
                        f"{number}, which has {tuple(batch.hidden.shape)}; start anew with "
                        "resume=False"
                    )
                value = hidden.to(batch.hidden.device)
                if name == number:
                    batch.hidden = value
                else:
                    batch.original = value
                missing.remove(name)
    if missing:
        raise CheckpointError(
            f"the unfinished run kept no hidden states for {len(missing)} of {len(batches)} "
            "batches; start anew with resume=False"
        )
