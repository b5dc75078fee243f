"""Importance files: saved, loaded, added over runs; also those of llama.cpp.

Per module a file holds the sum of x^2 of each input channel, and how many tokens it was summed
over. Sums of two runs add up to those of one run over all the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from steelyard.atomic_file import FileKind, safetensors_metadata
from steelyard.errors import ImportanceError
from steelyard.foreign import reason_of

__all__ = ["IMPORTANCE", "Importance", "load_importance", "merge_importance", "save_importance"]

Importance = dict[str, tuple[torch.Tensor, int]]
"""module -> (sum of squares per input channel, fp32; tokens)"""

_KIND = "importance 1"
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "mixtral": "llama"}
_ARCHITECTURES |= {"smollm3": "llama", "mistral": "llama", "gemma3_text": "gemma3"}


def _is_own(path: Path) -> bool:
    return (safetensors_metadata(path) or {}).get("steelyard") == _KIND


IMPORTANCE = FileKind("importance", _is_own, ImportanceError)


def save_importance(importance: Mapping[str, tuple[torch.Tensor, int]], path: str | Path) -> None:
    """Write a file atomically."""
    tensors = {}
    for name, (squares, tokens) in importance.items():
        tensors[f"{name}.sum"] = squares.detach().to("cpu", torch.float32).contiguous()
        tensors[f"{name}.count"] = torch.tensor(tokens, dtype=torch.int64)
    IMPORTANCE.write(path, save(tensors, metadata={"steelyard": _KIND}))


def load_importance(
    path: str | Path, modules: Iterable[str] = (), model_type: str = "llama"
) -> Importance:
    """Read a file that `save_importance` wrote, or llama.cpp's imatrix in GGUF.

    modules, model_type: of the model to quantize; GGUF has other names for modules
    """
    path = Path(path)
    if not path.is_file():
        raise ImportanceError(f"there is no importance file {path}")
    found = _load_gguf(path, modules, model_type) if path.suffix == ".gguf" else _load_own(path)
    for name, (squares, tokens) in found.items():
        if tokens < 1 or not bool((torch.isfinite(squares) & (squares >= 0)).all()):
            raise ImportanceError(
                f"{path} has invalid sums of squares for {name}, or no tokens ({tokens}); "
                "gather it again"
            )
    return found


def _load_own(path: Path) -> Importance:
    try:
        with safe_open(path, "pt") as file:
            kind = (file.metadata() or {}).get("steelyard")
            if kind != _KIND:
                raise ImportanceError(f"{path} holds {(kind or 'tensors')[:40]}, not importance")
            names = [key.removesuffix(".sum") for key in file.keys() if key.endswith(".sum")]  # noqa: SIM118
            return {
                name: (
                    _sums(file.get_tensor(f"{name}.sum")),
                    int(file.get_tensor(f"{name}.count")),
                )
                for name in names
            }
    except ImportanceError:
        raise
    except (SafetensorError, ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise ImportanceError(
            f"{path} is not an importance file ({reason_of(error)}); llama.cpp's older format "
            "can be rewritten as GGUF by llama-imatrix"
        ) from error


def _sums(stored: torch.Tensor) -> torch.Tensor:
    if stored.ndim != 1 or not stored.is_floating_point():
        raise ValueError(f"sums of shape {tuple(stored.shape)} and type {stored.dtype}")
    return stored.float()


def merge_importance(*parts: Importance) -> Importance:
    """Return the importance that one run over all the data would gather."""
    merged: Importance = {}
    for part in parts:
        for name, (squares, tokens) in part.items():
            before, count = merged.get(name, (torch.zeros_like(squares), 0))
            if before.shape != squares.shape:
                raise ImportanceError(
                    f"{name} has {len(before)} input channels in one file and {len(squares)} in "
                    "another; the files are not of one model"
                )
            merged[name] = (before + squares, count + tokens)
    return merged


def _load_gguf(path: Path, modules: Iterable[str], model_type: str) -> Importance:
    try:
        import gguf
    except ImportError:
        raise ImportanceError(f"reading {path} needs the package gguf: pip install gguf") from None
    try:
        found = _gguf_sums(gguf, _bounded_reader(gguf)(path), modules, model_type)
    except Exception as error:  # gguf's reader does not check the file and may raise anything
        raise ImportanceError(
            f"{path} is not a GGUF file, or damaged ({reason_of(error)}); write it again with "
            "llama-imatrix"
        ) from error
    if not found:
        raise ImportanceError(
            f"{path} has importance for none of the modules: it is not an imatrix, or not of a "
            f"{model_type!r} model"
        )
    return found


def _bounded_reader(gguf: Any) -> Any:
    """Return gguf's reader, bounded by the file; it would loop over a list of 2**60 items."""

    class Bounded(gguf.GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("the file ends too early")
            return super()._get(offset, dtype, count, *order, **options)

    return Bounded


def _gguf_sums(gguf: Any, reader: Any, modules: Iterable[str], model_type: str) -> Importance:
    stored = {tensor.name: tensor for tensor in reader.tensors}
    wanted = _ARCHITECTURES.get(model_type, model_type)
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known.get(wanted, gguf.MODEL_ARCH.LLAMA), 1024)
    found: Importance = {}
    for module in modules:
        plain, expert = _without_expert(module)
        name = names.get_name(f"{plain}.weight", try_suffixes=(".weight",))
        if f"{name}.in_sum2" not in stored:
            continue
        squares = torch.from_numpy(stored[f"{name}.in_sum2"].data.copy()).float()
        counts = torch.from_numpy(stored[f"{name}.counts"].data.copy()).flatten()
        columns = squares.shape[-1]
        row = squares.reshape(-1, columns)[expert or 0]
        found[module] = (row, int(counts[expert or 0]))
    return found


def _without_expert(module: str) -> tuple[str, int | None]:
    """Split the index of an expert from a module's name.

    >>> _without_expert("model.layers.0.mlp.experts.7.up_proj")
    ('model.layers.0.mlp.experts.up_proj', 7)
    """
    parts = module.split(".")
    if "experts" in parts:
        place = parts.index("experts") + 1
        if place < len(parts) and parts[place].isdigit():
            return ".".join(parts[:place] + parts[place + 1 :]), int(parts[place])
    return module, None
