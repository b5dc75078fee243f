"""Which scheme vLLM gives to a layer: its rules for targets, `ignore`, fused layers and experts.

As in vLLM's main branch of September 2026. They differ from those of compressed-tensors:

- A fused layer is looked up by its own name, then by its class, and only then by the names of its
  parts, all of which must match; the first part's scheme is used without a comparison. So `Linear`
  wins over the names of its parts, and `re:.*v_proj` matches `qkv_proj`, `re:.*up_proj` matches
  `gate_up_proj`.
- The experts of a layer are looked up as `experts.0.gate_proj`, `up_proj` and `down_proj`, whatever
  the files call them; the other experts are not looked at.
- `Linear` matches every class whose name contains it: not the output head, and not an embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from steelyard.checkpoint.patterns import PREFIX
from steelyard.checkpoint.written import likely_class
from steelyard.errors import CheckpointError
from steelyard.fusion import expert_groups, fused_groups, fused_name
from steelyard.model.matching import HEAD, is_router

__all__ = ["ServedLayer", "Unservable", "VllmConfig", "lookups", "vllm_layers"]

_LINEAR, _EXPERTS = "ParallelLinear", "RoutedExperts"
_EMBEDDING, _HEAD = "VocabParallelEmbedding", "ParallelLMHead"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Unservable(CheckpointError):
    """vLLM refuses to load the layer; the message says why."""


@dataclass(frozen=True)
class ServedLayer:
    """A layer of vLLM.

    kind:  its class, as far as targets tell classes apart
    parts: the modules of the files that it is loaded from
    """

    name: str
    kind: str
    parts: tuple[str, ...]

    @property
    def is_fused(self) -> bool:
        return self.kind == _LINEAR and len(self.parts) > 1

    @property
    def has_experts(self) -> bool:
        return self.kind == _EXPERTS


def vllm_layers(modules: Iterable[str]) -> Iterator[ServedLayer]:
    """Yield the layers that vLLM makes from modules with a weight.

    >>> [layer.name for layer in vllm_layers(["mlp.gate_proj", "mlp.up_proj", "lm_head"])]
    ['mlp.gate_up_proj', 'lm_head']
    """
    names = list(dict.fromkeys(modules))
    experts: dict[str, list[str]] = {}
    for group in expert_groups(names):
        experts.setdefault(group.layer, []).extend(group.names)
    owned = {name for members in experts.values() for name in members}
    others = [name for name in names if name not in owned]
    whole = {group[0]: group for group in fused_groups(others)}
    parts = {name for group in whole.values() for name in group[1:]}
    for name in others:
        if name in whole:
            yield ServedLayer(fused_name(whole[name]), _LINEAR, whole[name])
        elif name not in parts:
            yield ServedLayer(name, _kind(name), (name,))
    for name, members in experts.items():
        yield ServedLayer(name, _EXPERTS, tuple(members))


def lookups(layer: ServedLayer) -> list[str]:
    """Return the names under which vLLM looks for the scheme of a layer."""
    if not layer.has_experts:
        return [layer.name]
    return [f"{layer.name}.0.{leaf}" for leaf in _PROJECTIONS]


def _kind(name: str) -> str:
    if name.rpartition(".")[2] == HEAD:
        return _HEAD
    return _EMBEDDING if likely_class(name) == "Embedding" else _LINEAR


class VllmConfig:
    """A quantization_config as vLLM reads it."""

    def __init__(self, config: QuantizationConfig) -> None:
        self.ignore: list[str] = list(config.ignore or ())
        self._ignored = {entry for entry in self.ignore if not entry.startswith(PREFIX)}
        self._patterns = [entry for entry in self.ignore if entry.startswith(PREFIX)]
        self.targets: dict[str, QuantizationScheme] = {}
        for scheme in config.config_groups.values():
            if len(scheme.targets) == 1 and scheme.targets[0].endswith("Attention"):
                continue  # attention is quantized by its cache alone
            self.targets.update(dict.fromkeys(scheme.targets, scheme))

    def scheme_of(self, layer: ServedLayer) -> QuantizationScheme | None:
        """Return the scheme of a layer; None if it is loaded unquantized."""
        if layer.has_experts:
            return self._of_experts(layer)
        if is_router(layer.name) or self._ignores(layer):
            return None
        return self._matched(layer.name, layer.kind, layer.parts if layer.is_fused else ())

    def _of_experts(self, layer: ServedLayer) -> QuantizationScheme | None:
        targets = dict(self.targets)
        if "Linear" in targets:
            targets.setdefault(_EXPERTS, targets["Linear"])
        found = {}
        for name in lookups(layer):
            found[name] = None if self._has(name) else _first(name, _EXPERTS, targets)
        first, *others = found.values()
        if any(each is not first for each in others):
            listed = ", ".join(f"{name}: {_short(scheme)}" for name, scheme in found.items())
            raise Unservable(f"{layer.name}: its projections have several schemes ({listed})")
        return first

    def _ignores(self, layer: ServedLayer) -> bool:
        if not layer.is_fused or layer.name in self._ignored:
            return self._has(layer.name)
        found = {part: self._has(part) for part in layer.parts}
        if len(set(found.values())) > 1:
            alone = [part for part, ignored in found.items() if ignored]
            raise Unservable(
                f"{layer.name}: ignore names {', '.join(alone)}, but not all of "
                f"{', '.join(layer.parts)}, which are one layer"
            )
        return all(found.values())

    def _has(self, name: str) -> bool:
        return name in self._ignored or any(_matches(name, each) for each in self._patterns)

    def _matched(self, name: str, kind: str, parts: tuple[str, ...]) -> QuantizationScheme | None:
        found = _first(name, kind, self.targets)
        if found is not None or not parts:
            return found
        by_part = [_by_name(part, self.targets) for part in parts]
        return by_part[0] if all(by_part) else None


def _first(
    name: str, kind: str, targets: dict[str, QuantizationScheme]
) -> QuantizationScheme | None:
    """Return the scheme of the first target that matches the name, else the class."""
    if (named := _by_name(name, targets)) is not None:
        return named
    for target, scheme in targets.items():
        by_class = target.lower() in kind.lower() and not target.startswith(PREFIX)
        if by_class or (target.startswith(PREFIX) and _matches(kind, target)):
            return scheme
    return None


def _by_name(name: str, targets: dict[str, QuantizationScheme]) -> QuantizationScheme | None:
    return next((scheme for target, scheme in targets.items() if _matches(name, target)), None)


def _matches(name: str, target: str) -> bool:
    if target.startswith(PREFIX):
        return re.match(target.removeprefix(PREFIX), name) is not None
    return target == name


def _short(scheme: QuantizationScheme | None) -> str:
    if scheme is None or scheme.weights is None:
        return "not quantized"
    return f"{scheme.weights.num_bits} bits"
