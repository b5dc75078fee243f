"""Checks the tensors and the config of a plan against the model class, before any work."""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import QuantizationConfig

from steelyard.formats import TensorSpec
from steelyard.model.class_loading import loading_problems
from steelyard.model.skeleton import saved_as
from steelyard.model.source import Source
from steelyard.plan.plan import Plan
from steelyard.plan.written_config import written_config

__all__ = ["planned_loading"]


def planned_loading(source: Source, config: QuantizationConfig, plan: Plan) -> list[str]:
    """Return the problems that transformers would have with loading the planned checkpoint."""
    tensors = _stored(source)
    for planned in plan.quantized:
        key = source.module_key(planned.name)
        tensors.pop(f"{key}.weight", None)
        for leaf, spec in planned.tensors.items():
            tensors[f"{key}.{leaf}"] = spec
    quantized = {source.module_key(planned.name) for planned in plan.quantized}
    plain = [
        name.removesuffix(".weight")
        for name, (_, shape) in tensors.items()
        if name.endswith(".weight") and len(shape) == 2
    ]
    content = written_config(source, config, plan, [n for n in plain if n not in quantized])
    return loading_problems(content, tensors)


def _stored(source: Source) -> dict[str, TensorSpec]:
    """Return the tensors that would be written if nothing were quantized."""
    if source.shards is not None:
        infos = [source.shards.info(name) for name in source.shards.names()]
        return {info.name: (info.dtype, info.shape) for info in infos}
    model: Any = source.model
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    meta = {n: t.to("meta") for n, t in model.state_dict().items() if n not in tied}
    known = {source.keys[n]: meta.pop(n) for n in list(meta) if n in source.keys}
    stored = {**known, **saved_as(model, meta)}
    return {n: (t.dtype, tuple(t.shape)) for n, t in stored.items()}
