"""Errors of several schemes and observers on the same weights, by module, layer and case."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Case", "Comparison", "by_depth", "layer_of", "snr"]


@dataclass
class Case:
    """One scheme with one observer.

    stored_bytes: size of all weights that the scheme quantizes, including those not compared
    errors:       module -> squared error of the stored weight over the weight's sum of squares, or
                  with data, of its output over the square of the output
    refused:      why the scheme does not fit the model; then there are no errors
    """

    scheme: str
    observer: str
    stored_bytes: int | None = None
    bits_per_weight: float | None = None
    seconds: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.scheme} {self.observer}"


@dataclass
class Comparison:
    """The errors of all cases on the same weights.

    energies: module -> sum of squares of its weight, or with data of its output
    data:     what the outputs were computed on; None where errors are those of weights
    unseen:   modules that no token of the data reaches, such as experts: not compared
    """

    folder: Path
    cases: list[Case]
    energies: dict[str, float] = field(default_factory=dict)
    data: str | None = None
    unseen: list[str] = field(default_factory=list)

    def error(self, case: Case, modules: Iterable[str] | None = None) -> float | None:
        """Return the summed squared error of modules over their sum of squares."""
        names = [n for n in (case.errors if modules is None else modules) if n in case.errors]
        energy = sum(self.energies[name] for name in names)
        noise = sum(case.errors[name] * self.energies[name] for name in names)
        return (noise / energy if energy else 0.0) if names else None

    def layers(self) -> dict[str, list[str]]:
        """Return the modules of each layer by depth; each module outside of layers on its own."""
        found: dict[str, list[str]] = {}
        for name in self.energies:
            found.setdefault(layer_of(name) or name, []).append(name)
        return {layer: found[layer] for layer in by_depth(found)}

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        return {
            "model": str(self.folder),
            "measure": "weight" if self.data is None else "output",
            "data": self.data,
            "not_compared": self.unseen,
            "cases": [
                {
                    "scheme": case.scheme,
                    "observer": case.observer,
                    "bytes": case.stored_bytes,
                    "bits_per_weight": case.bits_per_weight,
                    "seconds": case.seconds,
                    "error": (error := self.error(case)),
                    "snr_db": snr(error),
                    "refused": case.refused,
                    "layers": {
                        layer: {"error": (e := self.error(case, names)), "snr_db": snr(e)}
                        for layer, names in self.layers().items()
                        if not case.refused
                    },
                    "modules": {
                        name: {"error": e, "snr_db": snr(e)} for name, e in case.errors.items()
                    },
                }
                for case in self.cases
            ],
        }


def snr(error: float | None) -> float | None:
    """Return the signal-to-noise ratio in decibels; None if there is no noise.

    >>> snr(0.01)
    20.0
    """
    return -10 * math.log10(error) if error else None


def layer_of(name: str) -> str | None:
    """Return the decoder layer that a module is in.

    >>> layer_of("model.layers.3.mlp.experts.7.up_proj")
    'model.layers.3'
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else ".".join(parts[: at + 1])


def by_depth(layers: Iterable[str]) -> list[str]:
    """Return layers in numerical order, one stack of layers after the other.

    Files list tensors in alphabetical order, in which layer 10 comes before layer 2.

    >>> by_depth(["model.layers.0", "model.layers.10", "model.layers.2", "lm_head"])
    ['model.layers.0', 'model.layers.2', 'model.layers.10', 'lm_head']
    """
    places: dict[str, tuple[str, int]] = {}
    for layer in layers:
        stack, _, number = layer.rpartition(".")
        places[layer] = (stack, int(number)) if number.isdecimal() else (layer, 0)
    stacks = list(dict.fromkeys(stack for stack, _ in places.values()))
    return sorted(places, key=lambda layer: (stacks.index(places[layer][0]), places[layer][1]))
