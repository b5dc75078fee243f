"""Finds the modules that read and write the residual stream, whatever their names.

Random tokens run through one layer of each kind. A norm whose input no module makes reads the
stream; modules that read its output are readers; the others with as many outputs as the stream has
channels are writers. They are accepted if the layer computes the same with its tensors and its
input rotated (`LayerProbe`), so a rotation is exact or refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from compressed_tensors.utils.match import match_name

from steelyard.algorithms.layer_probe import LayerProbe
from steelyard.algorithms.norm_probes import norm_offset, subtracts_mean
from steelyard.algorithms.rotated_parts import Parts, Values, add_residual, add_values
from steelyard.algorithms.tracing import TracedCall, pattern_of, reads, trace
from steelyard.errors import PlanError
from steelyard.kernels.rotation import Rotation
from steelyard.model.rewrites import Rewrites
from steelyard.modifiers.spinquant import NormMapping, SpinQuantMapping

__all__ = ["ResidualSearch", "Unrotatable"]

_TOLERANCE = 1e-3  # of what the layer adds to its input
_TRIES = 16  # sets of writers


class Unrotatable(PlanError):
    """A model or a layer that cannot be rotated; the message is the reason."""


class ResidualSearch:
    """The search in one layer, or in the modules outside of layers.

    mappings, norm_mappings: patterns of a recipe, instead of the found modules
    """

    def __init__(
        self,
        probe: LayerProbe,
        mappings: SpinQuantMapping | None = None,
        norm_mappings: list[NormMapping] | None = None,
    ) -> None:
        self.probe = probe
        self.block = probe.block
        self.mappings = mappings
        self.norm_mappings = norm_mappings
        self.tensors = set(self.block.tensors())
        self.channels = probe.hidden.shape[-1]
        self.shapes = {
            name: tuple(weight.shape)
            for name, module in self.block.within.items()
            if (weight := module._parameters.get("weight")) is not None and weight.ndim == 2
        }

    @functools.cached_property
    def calls(self) -> dict[str, TracedCall]:
        """The calls of modules with a weight, in order."""
        return trace(self.block)

    # -- the residual stream ------------------------------------------------------------------

    def layer(self, rotation: Rotation) -> Parts:
        """Return the parts of a layer's modules, checked."""
        norms, readers = self._norms_and_readers()
        more = self._likely_readers(norms, readers)
        for chosen in (readers, *([readers | more] if more else ())):
            for writers in self._sets_of_writers(chosen):
                parts = Parts(norms, chosen, writers)
                if self._is_same(parts, rotation):
                    return parts
        raise Unrotatable(
            f"{self.block.name} computes something else when its weights and its input are "
            "rotated: something in it reads the residual stream channel by channel"
        )

    def head(self, rotation: Rotation, head: str) -> Parts:
        """Return the parts of the last norm and the output head, checked."""
        norms, readers = self._norms_and_readers()
        readers = {name: norm for name, norm in readers.items() if name == head}
        used = set(readers.values())
        parts = Parts({n: offset for n, offset in norms.items() if n in used}, readers)
        if not readers or not self._is_same(parts, rotation, turned=False):
            raise Unrotatable(
                f"the modules after the last layer compute something else when {head} and its "
                "input are rotated"
            )
        return parts

    def embedding(self, rotation: Rotation, name: str) -> Parts:
        """Return the part of the token embedding, checked."""
        parts = Parts(embedding=name)
        if not self._is_same(parts, rotation, given=False):
            raise Unrotatable(
                f"the input of the first layer is more than rows of {name}, such as a norm or "
                "positions, which a rotation does not pass"
            )
        return parts

    def _norms_and_readers(self) -> tuple[dict[str, float], dict[str, str | None]]:
        norms: dict[str, float] = {}
        readers: dict[str, str | None] = {}
        hidden = self.probe.hidden
        for name, call in self.calls.items():
            if len(call.shape) == 2:
                if name not in readers and hidden.ndim > 1 and reads(call.input, hidden):
                    readers |= dict.fromkeys(self._alike(name), None)
                continue
            if call.shape[0] != self.channels or call.output.shape[-1] != self.channels:
                continue
            found = [n for n in self.shapes if n in self.calls and self._reads(n, call)]
            made = self._maker(call)
            if made is not None and made not in readers and not found:
                raise Unrotatable(
                    f"{name} multiplies the output of {made} by a gain before it is added to the "
                    "residual stream, and no later weight can hold that gain"
                )
            if made is None and found:
                self._require_no_mean(name, call)
                norms[name] = norm_offset(self.block.within[name], call.input, call.output.dtype)
                readers |= {each: name for n in found for each in self._alike(n)}
        return self._mapped(norms, readers)

    def _likely_readers(
        self, norms: Mapping[str, float], readers: Mapping[str, str | None]
    ) -> dict[str, str | None]:
        """Return modules that may read the norm before them through a product, as experts do."""
        found: dict[str, str | None] = {}
        last: str | None = None
        for name, call in self.calls.items():
            last = name if name in norms else last
            wide = len(call.shape) == 2 and call.shape[1] == self.channels != call.shape[0]
            if wide and last is not None and name not in readers and self.mappings is None:
                found |= dict.fromkeys(self._alike(name), last)
        return found

    def _reads(self, name: str, norm: TracedCall) -> bool:
        return reads(self.calls[name].input, norm.output)

    def _maker(self, norm: TracedCall) -> str | None:
        """Return the module whose output is the input of a norm."""
        earlier = itertools.takewhile(lambda call: call is not norm, self.calls.values())
        wide = [call for call in earlier if len(call.shape) == 2]
        return next((c.name for c in wide if reads(norm.input, c.output)), None)

    def _require_no_mean(self, name: str, call: TracedCall) -> None:
        module = self.block.within[name]
        if subtracts_mean(module, call.input) or f"{name}.bias" in self.tensors:
            raise Unrotatable(
                f"{name} is a {type(module).__name__}, which subtracts the mean of the channels; a "
                "rotation passes RMS norms only"
            )

    def _alike(self, name: str) -> list[str]:
        """Return the modules at the same place in all experts."""
        pattern = pattern_of(name, self.block.name)
        return [each for each in self.shapes if pattern_of(each, self.block.name) == pattern]

    def _mapped(
        self, norms: dict[str, float], readers: dict[str, str | None]
    ) -> tuple[dict[str, float], dict[str, str | None]]:
        """Return norms and readers as the patterns of the recipe name them."""
        if self.mappings is not None:
            m = self.mappings
            named = [m.attn_q, m.attn_k, m.attn_v, *m.mlp_in, m.lm_head]
            readers = {n: readers.get(n) for n in self.shapes if _matches(n, named)}
        for each in self.norm_mappings or ():
            for norm in [n for n in norms if match_name(n, each.norm)]:
                readers |= {n: norm for n in readers if _matches(n, each.linears)}
        used = set(readers.values())
        return {n: offset for n, offset in norms.items() if n in used}, readers

    def _sets_of_writers(self, readers: Mapping[str, str | None]) -> Iterator[tuple[str, ...]]:
        """Yield sets of modules that may write to the stream, all candidates first."""
        if self.mappings is not None:
            named = [self.mappings.attn_o, *self.mappings.mlp_out]
            yield tuple(name for name in self.shapes if _matches(name, named))
            return
        places: dict[str, list[str]] = {}
        for name, (rows, _) in self.shapes.items():
            if rows == self.channels and name not in readers:
                places.setdefault(pattern_of(name, self.block.name), []).append(name)
        sets = (
            chosen
            for size in range(len(places), -1, -1)
            for chosen in itertools.combinations(places.values(), size)
        )
        for chosen in itertools.islice(sets, _TRIES):
            yield tuple(name for names in chosen for name in names)

    def _is_same(
        self, parts: Parts, rotation: Rotation, given: bool = True, turned: bool = True
    ) -> bool:
        """Whether the output is that of the original, rotated.

        given:  the input is rotated
        turned: the output is expected to be
        """
        rewrites = Rewrites()
        add_residual(rewrites, parts, rotation, self.tensors)
        hidden, output = self.probe.hidden, self.probe.output
        found = self.probe.run(
            self._changed(rewrites),
            rotation.rotate(hidden).to(hidden.dtype) if given else None,
        )
        wanted = rotation.rotate(output) if turned else output.double()
        scale = output.double() - hidden.double() if given and turned else output.double()
        return float((found.double() - wanted).norm()) <= _TOLERANCE * float(scale.norm())

    def _changed(self, rewrites: Rewrites) -> dict[str, torch.Tensor]:
        changes = rewrites.changes(self.block.tensor)
        return {name: change(self.block.tensor(name)) for name, change in changes.items()}

    # -- values of attention ------------------------------------------------------------------

    def values(self, rotation_of: Callable[[int], Rotation]) -> Values | None:
        """Return the Linear layers that make and read the values; None if no pair can be rotated.

        rotation_of: returns the rotation of a head of some size
        """
        order = [name for name, call in self.calls.items() if len(call.shape) == 2]
        for place, reader in enumerate(order):
            parent: Any = self.block.within.get(reader.rpartition(".")[0])
            head = getattr(parent, "head_dim", None)
            if not isinstance(head, int) or head < 2:
                continue
            for source in reversed(order[:place]):
                values = self._fitting(source, reader, head, parent)
                if values is not None and self._is_pair(values, rotation_of(head)):
                    return values
        return None

    def _is_pair(self, values: Values, rotation: Rotation) -> bool:
        """Whether the layer computes the same, but not if the reader alone is rotated."""
        rewrites = Rewrites()
        add_values(rewrites, values, rotation, self.tensors)
        changed = self._changed(rewrites)
        least = _TOLERANCE * float((self.probe.output - self.probe.hidden).double().norm())
        alone = {name: changed[name] for name in [f"{values.reader}.weight"]}
        return self._difference(changed) <= least < self._difference(alone)

    def _difference(self, changed: Mapping[str, torch.Tensor]) -> float:
        return float((self.probe.run(changed).double() - self.probe.output.double()).norm())

    def _fitting(self, source: str, reader: str, head: int, parent: Any) -> Values | None:
        """Return the rows of `source` that may be the values that `reader` gets."""
        m = self.mappings
        if m is not None and not (match_name(source, m.attn_v) and match_name(reader, m.attn_o)):
            return None
        one, other = self.calls[source].input, self.calls[reader].input
        if source.rpartition(".")[0] != reader.rpartition(".")[0] or one is other:
            return None
        (rows, _), (_, columns) = self.shapes[source], self.shapes[reader]
        repeats = getattr(parent, "num_key_value_groups", None) or 1
        if not isinstance(repeats, int) or columns % (repeats * head):
            return None
        size = columns // repeats  # the last rows of a fused q, k and v
        return Values(source, reader, rows - size, size, head) if rows >= size else None


def _matches(name: str, patterns: list[str]) -> bool:
    return any(match_name(name, pattern) for pattern in patterns)
