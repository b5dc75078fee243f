"""Calls of a module in transformers' own forward, seen by plain hooks of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def calls_of(
    folder: Path, name: str, samples: Sequence[torch.Tensor]
) -> list[tuple[Any, Any, Any]]:
    """Return arguments, keyword arguments and output of a module, for each sample."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[tuple[Any, Any, Any]] = []
    model.get_submodule(name).register_forward_hook(
        lambda _m, args, kwargs, out: found.append((args, kwargs, out)), with_kwargs=True
    )
    with torch.no_grad():
        for sample in samples:
            model(input_ids=sample, use_cache=False)
    return found
