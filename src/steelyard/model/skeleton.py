"""Builds a model class without weights, and maps its tensors to those of the files.

The class may use other names than the files, and may concatenate several tensors. transformers
itself maps each tensor back to the names it would save it as.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Module, Parameter

from steelyard.checkpoint import CheckpointView, Shards
from steelyard.errors import PipelineError
from steelyard.foreign import reason_of, show
from steelyard.model.meta_parameters import parameters_on_meta
from steelyard.model.model_class import ModelClass, named_class
from steelyard.model.unstacking import unstack

__all__ = ["build_skeleton", "own_buffers", "parts_of", "saved_as"]

MORE, SPARE = 4, 100_000  # most parameters of a model: MORE per tensor of the files, plus SPARE
_LAYERS = re.compile(r"^(n|num)_(\w+_)?(layers?|blocks)$|^(en|de)coder_layers$")


def build_skeleton(
    folder: Path, shards: CheckpointView, trust_remote_code: bool
) -> tuple[Any, dict[str, str], dict[str, list[str]]]:
    """Return the model, its tensors with one name in the files, and those made of several.

    Stacked experts become Linear layers, each with its own tensors. A model that cannot be filled
    tensor by tensor is loaded as a whole.
    """
    skeleton = _skeleton(folder, shards, trust_remote_code)
    stored = {tensor: name for stack in unstack(skeleton) for tensor, name in stack.keys.items()}
    keys, joined, missing = _keys(skeleton, shards, stored)
    if missing:
        skeleton = _load_converted(folder, shards, skeleton, trust_remote_code)
        unstack(skeleton)
    _take_types(skeleton, keys, shards)
    _fill_buffers(skeleton, keys, shards)
    return skeleton.eval(), keys, joined


def _skeleton(folder: Path, shards: CheckpointView, trust_remote_code: bool) -> Any:
    """Build the model class with parameters on the meta device."""
    from transformers import AutoConfig

    _check_layers(shards)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if getattr(config, "quantization_config", None) is not None:  # the view dequantizes
            del config.quantization_config
        dtype = _stored_dtype(config, shards)
        make = _maker(config, shards, trust_remote_code)
        with parameters_on_meta(limit=MORE * len(shards) + SPARE):
            if _has_sdpa(config, shards):
                with contextlib.suppress(ValueError):  # a submodel may not have it
                    return make(config, dtype=dtype, attn_implementation="sdpa")
            return make(config, dtype=dtype)
    except (PipelineError, MemoryError):
        raise
    except Exception as error:  # a setting of a wrong type in config.json can raise anything
        kind = shards.config.get("model_type")
        raise PipelineError(
            f"{folder} is a {show(kind)}, which transformers cannot build "
            f"({reason_of(error)}). Correct config.json, or load the model with its own class and "
            "pass the module; a recipe that needs no calibration data works from the files alone"
        ) from error


def _maker(config: Any, shards: CheckpointView, trust_remote_code: bool) -> Callable[..., Any]:
    """Return the constructor of the class in config.json; else of a causal language model."""
    from transformers import AutoModelForCausalLM

    named = named_class(shards.config)
    if named is not None and not (trust_remote_code and hasattr(config, "auto_map")):
        return cast(Callable[..., Any], named._from_config)
    return functools.partial(AutoModelForCausalLM.from_config, trust_remote_code=trust_remote_code)


def _check_layers(shards: CheckpointView) -> None:
    """Reject more layers than there are tensors: building such a model may take hours."""
    parts = [shards.config, *(v for v in shards.config.values() if isinstance(v, dict))]
    for key, value in (item for part in parts for item in part.items()):
        if _LAYERS.search(key) and isinstance(value, (int, float)) and value > len(shards):
            raise PipelineError(
                f"{shards.folder / 'config.json'} has {key} {value:,}, but the files hold "
                f"{len(shards):,} tensors; they are not of one model: download both again"
            )


def _keys(
    model: Any, shards: Shards, stored: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Map the tensors of the model to their names in the files.

    Return those with one name, those made of several, and those without a name.

    stored: tensors of experts -> the names that transformers would save them as
    """
    prefix = f"{model.base_model_prefix}."
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    keys: dict[str, str] = {}
    joined: dict[str, list[str]] = {}
    missing = []
    renamed: dict[str, str] = {}  # tensors whose names differ between loading and saving
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in {**parameters, **dict(_persistent_buffers(model))}.items():
        usual = stored.get(name, name)
        names = [name, usual, usual.removeprefix(prefix), f"{prefix}{usual}"]
        found = next((n for n in names if n in shards), None)
        if found is not None:
            keys[name] = found
            if shards.info(found).shape != tuple(tensor.shape):
                raise PipelineError(
                    f"{found} is {shards.info(found).shape} in {shards.info(found).file}, but "
                    f"config.json implies {tuple(tensor.shape)}; they are not of one model"
                )
            continue
        if tied.get(name) in keys:  # asking transformers takes a third of a second
            keys[name] = keys[tied[name]]
            continue
        parts = parts_of(model, name, tensor.to("meta"))
        if any(part not in shards for part in parts):
            renamed = renamed or ModelClass(model, shards.names()).file_names()
            if name in renamed and shards.info(renamed[name]).shape == tuple(tensor.shape):
                keys[name] = renamed[name]
            else:
                missing += [name] if name in parameters else []
        elif len(parts) == 1 and shards.info(min(parts)).shape == tuple(tensor.shape):
            keys[name] = min(parts)
        elif len(parts) > 1 and _are_views(model, name, tensor):
            joined[name] = list(parts)
        else:  # also one that the files hold as a part of a larger one
            missing.append(name)
    for name, other in tied.items():
        if name in missing and other in keys:
            keys[name] = keys[other]
            missing.remove(name)
    return keys, joined, missing


def parts_of(model: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors, by name, that transformers would save for a tensor of the model."""
    return saved_as(model, {name: tensor})


def saved_as(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, by name, that transformers would save for those of the model."""
    from transformers.core_model_loading import revert_weight_conversion

    parts: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return parts


def _are_views(model: Any, name: str, like: torch.Tensor) -> bool:
    """Whether the saved tensors are views of the whole, so that it can be filled in place."""
    whole = torch.empty(like.shape, dtype=like.dtype)  # never written, so it takes no memory
    start, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    parts = parts_of(model, name, whole).values()
    inside = all(start <= part.data_ptr() < end for part in parts)
    return inside and sum(part.numel() for part in parts) == whole.numel()


def own_buffers(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers of one module."""
    for leaf, buffer in module._buffers.items():
        if buffer is not None and leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer


def _persistent_buffers(model: Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for leaf, buffer in own_buffers(module):
            yield f"{prefix}.{leaf}".strip("."), buffer


def _take_types(model: Module, keys: dict[str, str], shards: Shards) -> None:
    """Give parameters the types of the files, whatever the config says."""
    for prefix, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            key = keys.get(f"{prefix}.{leaf}".strip("."))
            if parameter is None or key is None or parameter.device.type != "meta":
                continue
            dtype = shards.info(key).dtype
            if dtype != parameter.dtype:
                meta = torch.empty(parameter.shape, dtype=dtype, device="meta")
                module._parameters[leaf] = Parameter(meta, requires_grad=False)


def _fill_buffers(model: Module, keys: dict[str, str], shards: Shards) -> None:
    for name, buffer in _persistent_buffers(model):
        if name in keys:
            buffer.copy_(shards.read(keys[name]))


def _load_converted(folder: Path, shards: CheckpointView, skeleton: Any, trust: bool) -> Any:
    """Load a model whose class converts tensors of the files, such as stacked experts."""
    from transformers import AutoModelForCausalLM

    loader = named_class(shards.config) or AutoModelForCausalLM
    options: dict[str, Any] = {
        "dtype": next(skeleton.parameters()).dtype,
        "output_loading_info": True,
    }
    answer: Any
    if "quantization_config" in shards.config:  # transformers would dequantize in its own way
        state = {name: shards.read(name) for name in shards.names()}
        answer = type(skeleton).from_pretrained(
            None, config=skeleton.config, state_dict=state, **options
        )
    else:
        try:  # without use_safetensors, it may open pytorch_model.bin, a pickle
            answer = loader.from_pretrained(
                folder, trust_remote_code=trust, use_safetensors=True, **options
            )
        except OSError as error:
            raise PipelineError(
                f"{folder}: the *.safetensors files lack tensors that {type(skeleton).__name__} "
                f"needs ({str(error).splitlines()[0][:160]}); other file formats are not read, "
                "so copy or download the missing shards"
            ) from error
    loaded, report = answer
    absent = sorted(report["missing_keys"])
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise PipelineError(
            f"{folder} has no tensor for {absent[0]}{more}, which {type(skeleton).__name__} needs"
        )
    return loaded


def _stored_dtype(config: Any, shards: Shards) -> torch.dtype:
    stated = getattr(config, "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    sizes: dict[torch.dtype, int] = {}
    for name in shards.names():
        info = shards.info(name)
        if info.dtype.is_floating_point:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda d: sizes[d])


def _has_sdpa(config: Any, shards: CheckpointView) -> bool:
    from transformers import AutoModelForCausalLM

    named = named_class(shards.config)
    if named is not None:
        return bool(getattr(named, "_supports_sdpa", False))
    try:
        classes = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return False
    one = classes[0] if isinstance(classes, tuple) else classes
    return bool(getattr(one, "_supports_sdpa", False))
