"""Replaces stacked experts by Linear layers during a run.

A stack is a module of transformers with 3-D parameters: `gate_up_proj` (or `up_proj` alone) and
`down_proj`, each (experts, out, in) or (experts, in, out). The Linear layers hold views of them, or
meta tensors if the model is a skeleton: no weight is copied.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Linear, Module, Parameter

from steelyard.checkpoint.expert_stacks import parts_of_stack
from steelyard.model.experts import Expert, Experts

__all__ = ["Unstacked", "expert_names", "unstack"]

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_LEAVES = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


@dataclass(frozen=True)
class Unstacked:
    """Experts that replace a stack.

    name:  of both in the model
    keys:  tensor of the model -> its name in the files, or the name it would be saved as
    """

    parent: Module
    name: str
    original: Module
    experts: Experts
    keys: dict[str, str]

    def put_back(self) -> None:
        """Put the stack back."""
        self.parent._modules[self.name.rpartition(".")[2]] = self.original


def unstack(model: Any) -> list[Unstacked]:
    """Replace all stacks of experts of a known form."""
    stacks = {name: module for name, module in model.named_modules() if _is_stack(module)}
    stored = _stored_names(model, stacks)
    done = []
    for name, module in stacks.items():
        experts = _experts(module)
        parent = model.get_submodule(name.rpartition(".")[0])
        parent._modules[name.rpartition(".")[2]] = experts
        done.append(Unstacked(parent, name, module, experts, stored[name]))
    return done


def expert_names(model: Any) -> dict[str, str]:
    """Return the weights that experts would have after `unstack` -> their names in files."""
    stacks = {name: module for name, module in model.named_modules() if _is_stack(module)}
    return {
        own: name for names in _stored_names(model, stacks).values() for own, name in names.items()
    }


# -- the form of a stack --------------------------------------------------------------------


def _is_stack(module: Module) -> bool:
    """Whether a module holds only experts, and its forward takes the output of a router."""
    held = {leaf for leaf, p in module._parameters.items() if p is not None}
    weights = [leaf for leaf in _WEIGHTS if leaf in held]
    known = {*weights, *(f"{leaf}_bias" for leaf in weights)}
    if len(weights) != 2 or "down_proj" not in held or not held <= known:
        return False
    if any(_parameter(module, leaf).ndim != 3 for leaf in weights):
        return False
    return set(module._modules) <= {"act_fn"} and _arguments(module) in (1, 3)


def _arguments(module: Module) -> int:
    forward = inspect.unwrap(type(module).forward)
    return len(inspect.signature(forward).parameters) - 1


def _parameter(module: Module, leaf: str) -> Parameter:
    parameter = module._parameters[leaf]
    assert parameter is not None
    return parameter


def _is_turned(module: Any) -> bool:
    """Whether weights are (in, out); the class says so, or the shapes do."""
    if hasattr(module, "is_transposed"):
        return bool(module.is_transposed)
    down = _parameter(module, "down_proj")
    inside = 2 * down.shape[1] if "gate_up_proj" in module._parameters else down.shape[1]
    first = next(_parameter(module, leaf) for leaf in _WEIGHTS if leaf in module._parameters)
    return tuple(first.shape[1:]) == (down.shape[2], inside)


def _experts(module: Any) -> Experts:
    turned, in_turns = _is_turned(module), not getattr(module, "is_concatenated", True)
    count = len(_parameter(module, "down_proj"))
    experts = []
    for number in range(count):
        linears: dict[str, Linear] = {}
        for leaf, names in _LEAVES.items():
            if leaf in module._parameters:
                weights = _parts(_parameter(module, leaf), number, len(names), turned, in_turns)
                bias = module._parameters.get(f"{leaf}_bias")
                biases = (
                    [None] * len(names)
                    if bias is None
                    else _parts(bias, number, len(names), turned, in_turns)
                )
                linears.update(zip(names, map(_linear, weights, biases), strict=True))
        experts.append(Expert(linears.get("gate_proj"), linears["up_proj"], linears["down_proj"]))
    bare = copy.copy(module)  # with the settings of the class, without its weights
    bare.__dict__ = {**module.__dict__, "_parameters": {}}
    gate = functools.partial(_gated if "gate_proj" in linears else _activated, bare, in_turns)
    return Experts(experts, gate, scaled=_arguments(module) == 1)


def _parts(
    stack: Parameter, number: int, count: int, turned: bool, in_turns: bool
) -> list[Parameter]:
    """Return views of the tensors of one expert in a stack."""
    whole = stack.detach()[number]
    whole = whole.t() if turned else whole  # (out, in), or (out,)
    parts = [whole[part::count] for part in range(count)] if in_turns else list(whole.chunk(count))
    return [Parameter(part, requires_grad=stack.requires_grad) for part in parts]


def _linear(weight: Parameter, bias: Parameter | None) -> Linear:
    linear = Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear._parameters.update(weight=weight, bias=bias)
    return linear


def _gated(module: Any, in_turns: bool, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    gate, up = outputs
    if not hasattr(module, "_apply_gate"):
        found: torch.Tensor = module.act_fn(gate) * up
        return found
    joined = torch.stack(outputs, -1).flatten(-2) if in_turns else torch.cat(outputs, -1)
    found = module._apply_gate(joined)
    return found


def _activated(module: Any, _in_turns: bool, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found: torch.Tensor = module.act_fn(outputs[0])
    return found


# -- names ------------------------------------------------------------------------------------


def _stored_names(model: Any, stacks: dict[str, Module]) -> dict[str, dict[str, str]]:
    """Return per stack: tensor of the experts that replace it -> its name in files.

    transformers maps a small stack of the same form, filled with an index for each tensor of an
    expert, to the tensors that it would save.
    """
    from transformers.core_model_loading import revert_weight_conversion

    small: dict[str, torch.Tensor] = {}
    owners: list[tuple[str, str]] = []  # by number: a stack, and a tensor of one of its experts
    for name, module in stacks.items():
        count = len(_parameter(module, "down_proj"))
        for leaf in [leaf for leaf, p in module._parameters.items() if p is not None]:
            parts = _LEAVES[leaf.removesuffix("_bias")]
            kind = "bias" if leaf.endswith("_bias") else "weight"
            first = len(owners)
            owners += [
                (name, f"{name}.{number}.{part}.{kind}")
                for number in range(count)
                for part in parts
            ]
            shape = (count, len(parts), 1)[: _parameter(module, leaf).ndim]
            numbers = torch.arange(first, len(owners)).reshape(shape)
            turned = numbers.ndim == 3 and _is_turned(module)
            small[f"{name}.{leaf}"] = numbers.transpose(1, 2) if turned else numbers
    found: dict[str, dict[str, str]] = {name: {} for name in stacks}
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, small) if small else {}
    dimensions = {int(numbers.min()): numbers.ndim for numbers in small.values()}
    for stored, part in saved.items():
        first = int(part.min())
        stack, own = owners[first]
        if part.ndim == dimensions.get(first):  # stacked in the files, too
            count = len(part)
            names = [each for expert in parts_of_stack(stored, count) for each in expert]
            own_names = [own for _, own in owners[first : first + len(names)]]
            found[stack].update(zip(own_names, names, strict=True))
        else:
            found[stack][own] = stored
    return found
