"""The plan of a run, made before any work.

Every module that holds a weight is either quantized or listed with the reason why not. A group size
that does not divide, a target that matches nothing, or a layer that the server fuses with an
unquantized one is an error here, not after hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch.nn import Embedding, Linear, Module, MultiheadAttention

from steelyard.errors import PlanError
from steelyard.formats import TensorSpec, expected_tensors
from steelyard.formats.served_rotation import ServedRotation
from steelyard.model.activations import Room
from steelyard.model.matching import is_named, is_router
from steelyard.model.precision import Forward
from steelyard.modifiers import Modifier
from steelyard.names import WEIGHT_OBSERVER
from steelyard.observers import Observer
from steelyard.plan.claims import (
    claims_of,
    cross_claims,
    merged_config,
    refuse_slow_patterns,
)
from steelyard.plan.plan_text import plan_text
from steelyard.plan.planned_attention import attention_modifier, attention_modules
from steelyard.plan.problems import errors_of, warnings_of
from steelyard.plan.tied_weights import TiedHeads
from steelyard.words import count

__all__ = ["Left", "Plan", "Planned", "make_plan", "search_time"]

# For the estimate: products per second and thread, bytes per second of a disk.
_FLOPS, _DISK = 4e10, 5e8
_UNCALLED = "MultiheadAttention does not call it, but reads its weight"
_ROUTES = "sends tokens to experts; a target that names it would quantize it"


@dataclass(frozen=True)
class Planned:
    """A module that will be quantized."""

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    scheme: QuantizationScheme
    group: str
    modifier: int = 0  # index in the recipe

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """Its stored tensors: local name -> dtype and shape."""
        return expected_tensors(self.scheme, self.shape, self.dtype)

    @property
    def stored_bytes(self) -> int:
        return sum(_bytes(dtype, shape) for dtype, shape in self.tensors.values())


@dataclass(frozen=True)
class Left:
    """A weight that is not quantized, and why."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(repr=False)
class Plan:
    """The modules to quantize and how, those to skip and why, sizes and costs."""

    config: QuantizationConfig
    quantized: list[Planned] = field(default_factory=list)
    untied: dict[str, str] = field(default_factory=dict)  # head -> the embedding it was tied to
    attention: list[str] = field(default_factory=list)
    attention_modifier: int = 0  # index in the recipe of the one that quantizes attention states
    left: list[Left] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    source_bytes: int = 0
    small_bytes: int = 0  # norms, biases and the like
    layers: int = 1
    hidden: int = 0
    algorithms: list[str] = field(default_factory=list)  # of the recipe's steps, in their order
    device: str = "cpu"
    samples: int = 0  # of calibration data, at most
    tokens: int = 0  # calibration tokens
    budget: int = 0  # bytes of the source that a stream holds at once
    passes: float = 1  # of the tokens through each layer; Hessians cost as much as half a pass
    state_bytes: int = 0  # of the algorithms for a block, such as the Hessians of GPTQ
    waiting: int = 0  # bytes of the batches that wait inside of a layer
    whole: bool = False  # whether data runs through the model as a whole
    served: list[ServedRotation] = field(default_factory=list)  # rotations at run time
    route: str = ""  # how calibration data runs through the model, if there is any
    chosen: list[str] = field(default_factory=list)  # what was chosen before the run, and how
    forward: Forward = field(default_factory=Forward)  # the type that batches are computed in
    room: Room = field(default_factory=Room)  # for hidden states
    hidden_bytes: int = 0  # of the hidden states of all samples, at most
    device_memory: int = 0  # bytes, estimated at most; 0 on a CPU
    through: Any = None  # where a stream quantizes weights, as `engine.stream_device` measured
    placing: list[str] = field(default_factory=list)  # what is on the device, as sentences

    @property
    def output_bytes(self) -> int:
        kept = sum(left.nbytes for left in self.left) + self.small_bytes
        return kept + sum(planned.stored_bytes for planned in self.quantized)

    @property
    def seconds(self) -> float:
        """Estimated seconds of the run: scale searches, forward passes, and file reading."""
        threads = torch.get_num_threads()
        search = sum(search_time(p) for p in self.quantized)
        products = sum(p.shape[0] * p.shape[1] for p in self.quantized) * self.tokens
        return (search + 2 * self.passes * products / _FLOPS) / threads + self.source_bytes / _DISK

    @property
    def memory(self) -> int:
        """Estimated peak memory in bytes of a run from a folder, without the libraries.

        One layer, or all weights outside of layers; with data also an fp32 copy of them, the hidden
        states, the batches that wait inside of a layer, and the algorithms' state. A stream holds
        the tensors in flight and their quantized versions, counted as the same size.
        """
        if self.budget:
            return 2 * self.budget
        inside = sum(_bytes(p.dtype, p.shape) for p in self.quantized) // max(self.layers, 1)
        outside = sum(left.nbytes for left in self.left) + self.small_bytes
        most = inside * max(self.layers, 1) + outside if self.whole else max(inside, outside)
        weights = most * (3 if self.tokens else 1)
        states = min(4 * self.tokens * self.hidden, self.room.host)
        return weights + states + self.state_bytes + self.waiting

    def require(self) -> None:
        """Raise if the plan has errors."""
        if self.errors:
            lines = "\n".join(f"  - {error}" for error in self.errors)
            raise PlanError(f"the recipe does not fit the model, and nothing was done:\n{lines}")

    def __repr__(self) -> str:
        return (
            f"<Plan: {count(len(self.quantized), 'module')} to quantize, {len(self.left)} not, "
            f"{count(len(self.errors), 'error')}, {count(len(self.warnings), 'warning')}>"
        )

    def __str__(self) -> str:
        return plan_text(self)


def make_plan(
    model: Any, config: QuantizationConfig | None = None, modifiers: Sequence[Modifier] = ()
) -> Plan:
    """Match a recipe against the modules of a model, whose weights may be on the meta device.

    config:    quantization config, used if there are no modifiers
    modifiers: modifiers of the recipe; each also checks the plan
    """
    claims = claims_of(config, modifiers)
    refuse_slow_patterns(model, claims, modifiers)
    plan = Plan(QuantizationConfig(config_groups={}))
    plan.algorithms = [type(modifier).algorithm for modifier in modifiers]
    plan.served = [rotation for each in modifiers for rotation in each.served_rotations()]
    owners: dict[int, str] = {}  # id of a parameter -> the first module that has it
    shared: dict[tuple[str, str], list[str]] = {}  # modules of two modifiers
    uncalled, tied = _uncalled(model), TiedHeads(model)
    for name, module in model.named_modules():
        matches = [claim.match(model, name, module) for claim in claims]
        taken = [match for match in matches if match.taken]
        unasked = tied.refusal(name) if taken else None
        unasked = _ROUTES if isinstance(module, Linear) and is_router(name) else unasked
        if unasked:  # target Linear means what it computes with, not where tokens go
            taken = [match for match in taken if is_named(model, name, match.hits)]
        if len(taken) > 1 and isinstance(module, (Linear, Embedding)):
            labels = (taken[0].claim.label, taken[1].claim.label)
            shared.setdefault(labels, []).append(name)
        if isinstance(module, (Linear, Embedding)) and module not in uncalled and taken:
            group = taken[0].group
            assert group is not None
            scheme = taken[0].claim.groups[group]
            if scheme.weights is None and scheme.input_activations is None:
                continue
            weight: Any = module.weight
            rows, columns = weight.shape
            plan.quantized.append(
                Planned(name, (rows, columns), weight.dtype, scheme, group, taken[0].claim.modifier)
            )
        else:
            hits = [hit for match in matches for hit in match.hits]
            ignored = next((m.ignored for m in matches if m.ignored is not None), None)
            why = _UNCALLED if module in uncalled else unasked
            plan.left += _left(name, module, hits, ignored, owners, why)
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), name)
    plan.untied = tied.untied(plan)
    plan.config = merged_config(model, claims, {p.name: p.group for p in plan.quantized})
    if plan.config.kv_cache_scheme is not None or plan.config.config_groups:
        plan.attention = attention_modules(model, plan.config)
        plan.attention_modifier = attention_modifier(claims)
    taken_names = {p.name for p in plan.quantized} | {left.name for left in plan.left}
    for name, parameter in model.named_parameters():
        nbytes = _bytes(parameter.dtype, tuple(parameter.shape))
        plan.source_bytes += nbytes
        owner, _, leaf = name.rpartition(".")
        if not (owner in taken_names and leaf == "weight") and name not in taken_names:
            plan.small_bytes += nbytes
    plan.errors += cross_claims(claims, shared)
    plan.errors += errors_of(plan, model, claims, modifiers)
    plan.warnings += warnings_of(plan, model, claims, modifiers)
    return plan


def _left(
    name: str,
    module: Module,
    hits: list[str],
    ignored: str | None,
    owners: dict[int, str],
    why: str | None,
) -> Iterator[Left]:
    for leaf, parameter in module._parameters.items():
        if parameter is None or parameter.ndim < 2:
            continue
        whole = name if leaf == "weight" else f"{name}.{leaf}"
        nbytes = _bytes(parameter.dtype, parameter.shape)
        if id(parameter) in owners:
            reason, nbytes = f"the weight of {owners[id(parameter)]}, which is stored once", 0
            reason = why if why and hits and ignored is None else reason
        elif parameter.ndim > 2:
            reason = f"a {parameter.ndim}-D parameter; only 2-D weights of Linear are quantized"
        elif ignored is not None:
            reason = f"ignored by {ignored!r}"
        elif why is not None and hits:
            reason = why
        elif hits:
            reason = f"{type(module).__name__} is not a Linear or Embedding"
        else:
            reason = f"no target matches {type(module).__name__}"
        yield Left(whole, tuple(parameter.shape), nbytes, reason)


def _uncalled(model: Any) -> set[Module]:
    """Return the layers inside torch's own attention, which reads their weights only."""
    attention = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
    return {child for each in attention for child in each.children()}


def search_time(planned: Planned) -> float:
    """Estimate the seconds that one thread needs to find a module's scales."""
    weights = planned.scheme.weights
    if weights is None:
        return 0.0
    observer = Observer.get_value_from_registry(weights.observer or WEIGHT_OBSERVER)
    return planned.shape[0] * planned.shape[1] * observer.seconds_per_weight


def _bytes(dtype: torch.dtype, shape: Any) -> int:
    return int(torch.Size(shape).numel() * dtype.itemsize)
