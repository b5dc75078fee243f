"""The layers that a server fuses into one, and the scales that the fused layers must share.

vLLM fuses q, k and v into one matrix, and gate and up into another. If the format has a single
scale for that matrix (NVFP4's global scale, a per-tensor FP8 scale), the layers must agree on it
before they are quantized. It stacks the experts of a layer, and quantizes the inputs of all with
one scale. This module is the only place that knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

__all__ = [
    "FUSED_LAYER_NAMES",
    "ExpertGroup",
    "expert_groups",
    "fused_groups",
    "fused_name",
    "serving_units",
    "shared_parameter",
    "shared_parameters",
    "solved_together",
]

FUSED_LAYER_NAMES: list[tuple[str, ...]] = [
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),  # Qwen3-Next, Qwen3.5
    ("in_proj_b", "in_proj_a"),
]
"""Attribute names of sibling layers that the server fuses into one."""
_FUSED_NAMES = {
    "q_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "w1": "w13",
    "q_a_proj": "fused_qkv_a_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
}
"""First of the fused layers -> vLLM's name of the whole."""

_CROSS = ("cross_attn", "encoder_attn")
"""Cross-attention: queries have another input than keys and values, and are not fused with them."""
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<leaf>[^.]+)")
_OUTPUTS = ("down_proj", "w2")


@dataclass(frozen=True)
class ExpertGroup:
    """The modules that have the same position in all experts of one decoder layer.

    experts: number of an expert -> its modules, such as gate and up
    inner:   whether their input is the expert's own intermediate state, not the hidden state
    """

    layer: str
    experts: dict[int, tuple[str, ...]]
    inner: bool

    @property
    def names(self) -> list[str]:
        return [name for names in self.experts.values() for name in names]


def expert_groups(names: Iterable[str]) -> list[ExpertGroup]:
    """Return the groups of experts among modules, in the order of the names.

    >>> names = ["mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "mlp.experts.0.down_proj"]
    >>> [(group.experts, group.inner) for group in expert_groups(names)]
    [({0: ('mlp.experts.0.up_proj',), 1: ('mlp.experts.1.up_proj',)}, False), \
({0: ('mlp.experts.0.down_proj',)}, True)]
    """
    found: dict[tuple[str, bool], dict[int, tuple[str, ...]]] = {}
    for name in names:
        if (match := _EXPERT.fullmatch(name)) is not None:
            group = found.setdefault((match["layer"], match["leaf"] in _OUTPUTS), {})
            number = int(match["number"])
            group[number] = (*group.get(number, ()), name)
    return [
        ExpertGroup(layer, dict(sorted(experts.items())), inner)
        for (layer, inner), experts in found.items()
    ]


def fused_groups(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the groups of modules among `names` that the server fuses.

    >>> list(fused_groups(["attn.q_proj", "attn.o_proj", "attn.k_proj"]))
    [('attn.q_proj', 'attn.k_proj')]
    >>> list(fused_groups(["cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj"]))
    [('cross_attn.k_proj', 'cross_attn.v_proj')]
    """
    known = dict.fromkeys(names)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in known):
        crossing = parent.rpartition(".")[2] in _CROSS
        for leaves in FUSED_LAYER_NAMES:
            leaves = tuple(leaf for leaf in leaves if not (crossing and leaf == "q_proj"))
            paths = (f"{parent}.{leaf}".lstrip(".") for leaf in leaves)
            present = tuple(path for path in paths if path in known)
            if len(present) > 1:
                yield present


def serving_units(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return all modules, grouped into those that a server gives one scheme.

    These are the layers that it fuses, and all projections of all experts of a layer.

    >>> serving_units(["a.up_proj", "a.down_proj", "a.gate_proj"])
    [('a.up_proj', 'a.gate_proj'), ('a.down_proj',)]
    >>> serving_units(["l.experts.0.up_proj", "l.experts.0.down_proj", "l.experts.1.up_proj"])
    [('l.experts.0.up_proj', 'l.experts.0.down_proj', 'l.experts.1.up_proj')]
    """
    known = dict.fromkeys(names)
    unit = {name: name for name in known}
    for group in fused_groups(known):
        unit.update(dict.fromkeys(group, group[0]))
    for name in known:
        if (match := _EXPERT.fullmatch(name)) is not None:
            unit[name] = match["layer"]
    found: dict[str, list[str]] = {}
    for name in known:
        found.setdefault(unit[name], []).append(name)
    return [tuple(members) for members in found.values()]


def fused_name(group: tuple[str, ...]) -> str:
    """Return vLLM's name of the layer that it fuses from a group of `fused_groups`.

    >>> fused_name(("attn.q_proj", "attn.k_proj", "attn.v_proj"))
    'attn.qkv_proj'
    """
    parent, _, leaf = group[0].rpartition(".")
    for leaves in FUSED_LAYER_NAMES:
        if leaf in leaves:
            return f"{parent}.{_FUSED_NAMES[leaves[0]]}".lstrip(".")
    raise ValueError(f"{group[0]} is not fused with others")


def shared_parameter(args: QuantizationArgs | None, base_name: str) -> str | None:
    """Return the parameter that fused layers share; None if each has its own.

    base_name: weight | input
    """
    if args is None or args.dynamic is True:
        return None
    if args.strategy == "tensor_group":
        return f"{base_name}_global_scale"
    one_scale = args.strategy == "tensor" and args.type == "float"
    return f"{base_name}_scale" if one_scale else None


def shared_parameters(scheme: QuantizationScheme) -> list[str]:
    """Return the parameters that fused layers share."""
    values = {"weight": scheme.weights, "input": scheme.input_activations}
    found = (shared_parameter(args, base_name) for base_name, args in values.items())
    return [name for name in found if name is not None]


def solved_together(schemes: Mapping[str, QuantizationScheme]) -> dict[str, tuple[str, ...]]:
    """Return for each module the group to solve together, since it shares a weight scale.

    A module that shares no scale is its own group.
    """
    units: dict[str, tuple[str, ...]] = {name: (name,) for name in schemes}
    for group in fused_groups(schemes):
        if shared_parameter(schemes[group[0]].weights, "weight") is not None:
            units.update(dict.fromkeys(group, group))
    return units
