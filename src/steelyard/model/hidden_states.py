"""Outputs of layers in files, so that a run can resume between two layers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from steelyard.atomic_file import sync
from steelyard.checkpoint.tensor_file import save_tensors
from steelyard.errors import CheckpointError
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.placeholders import Structure, filled, places_in

__all__ = ["load_hidden", "save_hidden"]

Named = Mapping[str, Batch]
"""Batches by a name that is unique among all batches of the run."""


def save_hidden(sequence: LayerSequence, batches: Named, path: Path) -> None:
    """Write the outputs that batches keep, and sync the file to disk."""
    states: dict[str, torch.Tensor] = {}
    kept: dict[str, list[int]] = {}
    for name, batch in batches.items():
        kept[name] = sorted(batch.outputs)
        for layer, output in batch.outputs.items():
            for place, tensor in places_in(output):
                key = "/".join(map(str, (name, layer, *place)))
                states[key] = tensor.cpu().contiguous().clone()  # several may be one
    metadata = {
        "structures": json.dumps({str(k): v for k, v in sequence.structures.items()}),
        "kept": json.dumps(kept),
    }
    save_tensors(states, path, metadata)
    sync(path)


def load_hidden(sequence: LayerSequence, batches: Named, paths: Iterable[Path]) -> None:
    """Read the outputs of batches from the files of all ranks; raise if a batch is missing."""
    missing = set(batches)
    for path in paths:
        with safe_open(path, "pt") as file:
            stored = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
            structures: dict[str, Structure] = stored.get("structures", {})
            sequence.structures.update({int(k): v for k, v in structures.items()})
            kept: dict[str, list[int]] = stored.get("kept", {})
            for name in missing.intersection(kept):
                batch = batches[name]
                for layer in kept[name]:
                    batch.outputs[layer] = _output(file, name, layer, batch, sequence)
                missing.remove(name)
    if missing:
        raise CheckpointError(
            f"the unfinished run saved no hidden states for {len(missing)} of {len(batches)} "
            "batches; start anew with resume=False"
        )


def _output(file: Any, name: str, layer: int, batch: Batch, sequence: LayerSequence) -> Any:
    device = next(iter(batch.inputs.values())).device

    def leaf(place: tuple[int | str, ...], _kind: str) -> torch.Tensor:
        found: torch.Tensor = file.get_tensor("/".join(map(str, (name, layer, *place))))
        return found.to(device) if sequence.held is None else sequence.held.put(found, device)

    return filled(sequence.structures[layer], leaf)
