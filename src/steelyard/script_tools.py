"""Functions that llm-compressor's scripts call around `oneshot`: loading, ranks, generating."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist

from steelyard.engine.result import Result
from steelyard.entry import oneshot
from steelyard.model.untying import tied_heads, untie

__all__ = [
    "dispatch_for_generation",
    "get_local_gpu_group_size",
    "get_main_device",
    "get_rank_partition",
    "init_gpu_group_dist",
    "linearize_moe",
    "load_context",
    "load_quantizable_moe",
    "moe_calibration_context",
    "oneshot",
    "replace_modules_for_calibration",
    "skip_weights_initialize",
    "untie_word_embeddings",
]

_IN_HOST_MEMORY = ("auto_offload", "cpu")  # the first is known to llm-compressor's loader alone
_DATA = "pass the dataset to oneshot, which tokenizes and batches it"

MISSING = {
    "get_processed_dataset": _DATA,
    "get_calibration_dataloader": _DATA,
    "format_calibration_data": _DATA,
    "DatasetArguments": "pass the arguments to oneshot by name",
    "ModelArguments": "pass the arguments to oneshot by name",
    "RecipeArguments": "pass the arguments to oneshot by name",
    "parse_args": "pass the arguments to oneshot by name",
    "TextGenerationDataset": "pass preprocessing_func to oneshot",
    "skip_weights_download": "pass the folder of the model to oneshot with dry_run=True",
    "trace": "nothing is traced; oneshot(..., dry_run=True) shows the layers that would run",
    "repack_moe": "experts are written under the names that vLLM reads",
    "modify_save_pretrained": "oneshot changes save_pretrained of a module that it quantizes",
}
"""Name of llm-compressor -> what to do instead."""

_OF_TRANSFORMERS = ("DeepseekV32ForCausalLM",)  # classes that llm-compressor has of its own


@contextlib.contextmanager
def load_context(model_cls: Any = None) -> Iterator[None]:
    """Load a model in host memory, as `from_pretrained` does without a device map.

    model_cls: the class whose `from_pretrained` is called; AutoModelForCausalLM by default
    """
    if model_cls is None:
        from transformers import AutoModelForCausalLM as model_cls
    own = model_cls.__dict__.get("from_pretrained")
    load = model_cls.from_pretrained

    def from_pretrained(*args: Any, **options: Any) -> Any:
        if options.get("device_map") in _IN_HOST_MEMORY:
            del options["device_map"]
        return load(*args, **options)

    model_cls.from_pretrained = from_pretrained
    try:
        yield
    finally:
        if own is None:
            del model_cls.from_pretrained
        else:
            model_cls.from_pretrained = own


load_quantizable_moe = load_context


def linearize_moe(model: Any, *args: Any, **options: Any) -> Any:
    """Return the model: `oneshot` makes stacked experts Linear layers itself."""
    return model


replace_modules_for_calibration = linearize_moe


@contextlib.contextmanager
def moe_calibration_context(*args: Any, **options: Any) -> Iterator[None]:
    """Change nothing: `moe_calibrate_all_experts` of `oneshot` decides which tokens experts see."""
    yield


@contextlib.contextmanager
def skip_weights_initialize(use_zeros: bool = False) -> Iterator[None]:
    """Change nothing: a model that is built inside has its usual initial values."""
    if use_zeros:
        raise ValueError("use_zeros=True: build the model, and set its parameters to zero")
    yield


def dispatch_for_generation(model: Any, *args: Any, **options: Any) -> Any:
    """Return a quantized model that generates: on the accelerators, or where it is without one."""
    module = model.model if isinstance(model, Result) else model
    if not torch.accelerator.is_available():
        return module
    from compressed_tensors.offload import dispatch_model

    return dispatch_model(module, *args, **options)


def get_main_device() -> torch.device:
    """Return the accelerator of this rank, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, dist.get_rank() if dist.is_initialized() else 0)


def get_local_gpu_group_size() -> int:
    """Return 1: a rank computes on one accelerator."""
    return 1


def init_gpu_group_dist(gpus_per_group: int | None = None) -> tuple[int, int, int]:
    """Join the ranks of torchrun; return this rank, their number, and the accelerator's index."""
    from compressed_tensors.offload import init_dist

    init_dist()
    return dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])


def get_rank_partition(split: str, num_samples: int) -> str:
    """Return the slice of a split that belongs to this rank.

    >>> get_rank_partition("train", 512)
    'train[0:512]'
    """
    if "[" in split:
        raise ValueError(f"{split!r} is a slice already; pass the name of the split")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"{split}[{num_samples * rank // ranks}:{num_samples * (rank + 1) // ranks}]"


def untie_word_embeddings(model: Any) -> None:
    """Give the output head a weight of its own."""
    for head in tied_heads(model):
        untied = untie(model, head)
        parameter = model.get_submodule(head)._parameters["weight"]
        parameter.data = untied.weight.detach().clone()


def __getattr__(name: str) -> Any:
    if name in _OF_TRANSFORMERS:
        import transformers

        return getattr(transformers, name)
    if name in MISSING:
        raise ImportError(f"steelyard has no {name}: {MISSING[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
