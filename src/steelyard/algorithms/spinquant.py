"""SpinQuant (Liu et al. 2024) with Hadamard rotations: R1 and R2, folded into the weights.

    R1   residual stream h -> h Q       embedding, every writer, every reader, the output head
    R2   values of attention, by head   v_proj and o_proj

The model computes the same, and an outlier of one channel is spread over all of them, so inputs and
weights lose less when they are quantized.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.layer_probe import LayerProbe, Probes
from steelyard.algorithms.residual_search import ResidualSearch, Unrotatable
from steelyard.algorithms.rotated_parts import Parts, add_residual, add_served, add_values
from steelyard.errors import PipelineError, PlanError
from steelyard.kernels.rotation import Rotation, make_rotation
from steelyard.model.inputs import input_embedding, output_head
from steelyard.model.rewrites import Rewrites
from steelyard.model.source import Source
from steelyard.modifiers.spinquant import SpinQuantModifier

__all__ = ["SpinQuant"]


@Algorithm.register("spinquant")
class SpinQuant(Algorithm):
    """Rewrites the weights of the whole model before any other work; needs no data."""

    modifier: SpinQuantModifier

    def rewrite(self, source: Source, notes: list[str]) -> Rewrites:
        rewrites, tensors = Rewrites(), {name for name, _ in source.model.named_parameters()}
        for rotation in self.modifier.served_rotations():
            add_served(rewrites, source.model, rotation)
        if not {"R1", "R2"} & set(self.modifier.rotations):
            return rewrites
        try:
            probes = Probes(source)
            if "R1" in self.modifier.rotations:
                _check_stream(source.model, probes)
            with torch.no_grad(), probes:
                for name, parts in self._parts(probes, notes):
                    if "R1" in self.modifier.rotations:
                        add_residual(rewrites, parts, self._of_stream(probes.channels), tensors)
                    for values in parts.values:
                        add_values(rewrites, values, self._of_head(values.head, name), tensors)
        except PipelineError as error:
            reason = str(error).partition("; ")[0]
            raise PlanError(
                f"SpinQuantModifier runs random tokens through each kind of layer, but {reason}; "
                "remove it"
            ) from error
        return rewrites

    def _parts(self, probes: Probes, notes: list[str]) -> Iterator[tuple[str, Parts]]:
        """Yield each layer with the parts of its modules, then "" with those outside of layers."""
        known: dict[Any, tuple[str, Parts]] = {}
        without: list[str] = []
        for index, name, kind in probes.layers():
            if kind not in known:
                with probes.layer(index) as probe:
                    if probe is None:
                        continue
                    known[kind] = name, self._of_layer(probe)
            else:
                probes.skip(index)
            first, parts = known[kind]
            if not parts.values:
                without.append(name)
            yield name, parts.moved(first, name)
        if "R2" in self.modifier.rotations and without:
            if not any(parts.values for _, parts in known.values()):
                raise PlanError(
                    "SpinQuantModifier cannot apply R2: no layer has a Linear for the values of "
                    "attention and one that reads them, head by head; remove R2 from rotations"
                )
            notes.append(f"R2 does not rotate {_listed(without)}: no Linear there reads values")
        if "R1" in self.modifier.rotations:
            yield "", self._outside(probes)

    def _of_layer(self, probe: LayerProbe) -> Parts:
        modifier = self.modifier
        search = ResidualSearch(probe, modifier.mappings, modifier.norm_mappings)
        parts = Parts()
        if "R1" in modifier.rotations:
            with _explained():
                parts = search.layer(self._of_stream(search.channels))
        if "R2" in modifier.rotations:
            values = search.values(functools.partial(self._of_head, layer=probe.block.name))
            parts = replace(parts, values=() if values is None else (values,))
        return parts

    def _outside(self, probes: Probes) -> Parts:
        model, rotation = probes.source.model, self._of_stream(probes.channels)
        embedding, head = input_embedding(model), output_head(model)
        assert embedding is not None and head is not None
        with probes.outside() as (begin, end), _explained():
            parts = ResidualSearch(end).head(rotation, head)
            ResidualSearch(begin).embedding(rotation, embedding)
        return replace(parts, embedding=embedding)

    # -- rotations ----------------------------------------------------------------------------

    def _of_stream(self, channels: int) -> Rotation:
        size = self.modifier.transform_block_size or channels
        if channels % size:
            raise PlanError(
                f"transform_block_size is {size}, which does not divide the {channels} channels of "
                "the residual stream"
            )
        return _rotation(self.modifier.transform_type, size, "R1")

    def _of_head(self, size: int, layer: str) -> Rotation:
        own = f" {layer}" if self.modifier.randomize else ""
        return _rotation(self.modifier.transform_type, size, f"R2{own}")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Unrotatable as reason:
        raise PlanError(
            f"SpinQuantModifier cannot apply R1: {reason}. Use rotations: [R2]"
        ) from None


def _check_stream(model: Any, probes: Probes) -> None:
    """Refuse models whose residual stream begins or ends elsewhere, too."""
    with _explained():
        stacks = dict.fromkeys(name.rpartition(".")[0] for _, name, _ in probes.layers())
        if len(stacks) > 1:
            raise Unrotatable(f"the layers of {next(iter(stacks))} write to the residual stream")
        if input_embedding(model) is None or output_head(model) is None:
            raise Unrotatable(f"{type(model).__name__} has no token embedding or no output head")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


_rotation = functools.lru_cache(maxsize=4)(make_rotation)
