"""A block as an algorithm sees it: its modules, its tensors, its batches.

Tensors have the names of the model's `named_parameters`. `change` replaces one; the engine writes
it to the checkpoint, and the validator accepts that it differs from the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from steelyard.distributed import Ranks, ThreadPool
from steelyard.errors import PipelineError
from steelyard.model.activations import Fetched
from steelyard.observers.calibration import Calibration

__all__ = ["Block"]


class Block:
    """A block with the modules that one algorithm works on.

    name:      name of the block in the model; "" for everything outside of layers
    root:      the block itself, such as a decoder layer
    modules:   by name, those that the modifier quantizes or its targets match
    mine:      names of modules that this rank solves; those that share a scale have one rank
    originals: of each batch, hidden states of the unquantized model into and out of the block
    runs:      whether `forward` may be called
    numbers:   of each batch of this rank, its number in the run
    padding:   of each batch, the mask of its real tokens, (batch, seq); None if all are real
    adapted:   names of modules whose weights are not rounded to nearest, such as by GPTQ
    unserved:  what happens to modules whose inputs no static scale serves: note, dynamic or leave
    dynamic:   modules that a transform found to need dynamic scales of inputs, with the reason
    advance:   shows progress: takes the share of `tune` that was done since the last call, and a
               text
    """

    def __init__(
        self,
        name: str,
        root: Module,
        modules: Mapping[str, Module],
        *,
        within: Mapping[str, Module] | None = None,
        calibration: Calibration | None = None,
        owners: Mapping[str, int] | None = None,
        forwards: Sequence[Callable[[], torch.Tensor]] = (),
        originals: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        ranks: Ranks | None = None,
        pool: ThreadPool | None = None,
        device: torch.device | None = None,
        notes: list[str] | None = None,
        changed: set[str] | None = None,
        runs: bool = True,
        numbers: Sequence[int] = (),
        padding: Sequence[torch.Tensor | None] = (),
        adapted: Collection[str] = (),
        unserved: str = "note",
        dynamic: dict[str, str] | None = None,
        advance: Callable[[float, str], None] = lambda _share, _where: None,
    ) -> None:
        self.name = name
        self.root = root
        self.modules = dict(modules)
        self.within = dict(modules if within is None else within)
        self.ranks = ranks or Ranks()
        self.pool = pool or ThreadPool()
        self.device = device or torch.device("cpu")
        self.owners = owners or {}
        self.originals = Fetched(originals)
        self.notes: list[str] = [] if notes is None else notes
        self.changed: set[str] = set() if changed is None else changed
        self.runs = runs
        self.numbers = numbers
        self.padding = padding
        self.adapted = adapted
        self.unserved = unserved
        self.dynamic: dict[str, str] = {} if dynamic is None else dynamic
        self.advance = advance
        self._calibration = calibration
        self._forwards = forwards

    @property
    def mine(self) -> list[str]:
        return [name for name in self.modules if self.owners.get(name, 0) == self.ranks.rank]

    # -- observers ----------------------------------------------------------------------------

    @property
    def calibration(self) -> Calibration:
        """The observers on modules with a scheme, while the block is calibrated."""
        assert self._calibration is not None, "a transform has no observers"
        return self._calibration

    # -- tensors ------------------------------------------------------------------------------

    def tensors(self) -> Iterator[str]:
        """Yield the name of every parameter of the block, except scales that are still empty."""
        for path, module in self.within.items():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter.device.type != "meta":
                    yield f"{path}.{leaf}".strip(".")

    def parameter(self, name: str) -> Parameter:
        """Return a parameter by its name in the model."""
        module, leaf = self._place(name)
        parameter = module._parameters[leaf]
        assert parameter is not None
        return parameter

    def tensor(self, name: str) -> torch.Tensor:
        """Return the values of a parameter by its name in the model."""
        return self.parameter(name).data

    def change(self, name: str, value: torch.Tensor) -> None:
        """Replace a parameter; it keeps its dtype."""
        module, leaf = self._place(name)
        before = module._parameters[leaf]
        assert before is not None
        if value.shape != before.shape:
            raise PipelineError(
                f"{name} has shape {tuple(before.shape)} and cannot become {tuple(value.shape)}"
            )
        kept = value.detach().to(before.device, before.dtype)
        module._parameters[leaf] = Parameter(kept, requires_grad=False)
        self.changed.add(name)

    def _place(self, name: str) -> tuple[Module, str]:
        path, _, leaf = name.rpartition(".")
        module = self.within.get(path)
        if module is None or module._parameters.get(leaf) is None:
            raise PipelineError(
                f"{self.name or 'the model'} has no tensor {name}; a block holds those of its own "
                "modules"
            )
        return module, leaf

    def digests(self) -> dict[str, bytes]:
        """Return a digest of each tensor, to find those that change without `change`."""
        return {name: _digest(self.tensor(name)) for name in self.tensors()}

    # -- batches ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many batches this rank runs through the block."""
        return len(self._forwards)

    def forward(self, batch: int) -> torch.Tensor:
        """Run one of this rank's batches through the block as it is now; return the output."""
        if not self.runs:
            raise PipelineError(
                f"{self.name or 'the model'} runs no batches while modules are solved, unless the "
                "algorithm states Needs(gradients=True)"
            )
        return self._forwards[batch]()

    # -- parts --------------------------------------------------------------------------------

    def part(self, names: Collection[str], runs: bool = True) -> Block:
        """Return the same block, with other modules to work on."""
        modules = {name: self.within[name] for name in names}
        fields: dict[str, Any] = {
            "within": self.within,
            "calibration": self._calibration,
            "owners": self.owners,
            "forwards": self._forwards,
            "originals": self.originals,
            "ranks": self.ranks,
            "pool": self.pool,
            "device": self.device,
            "notes": self.notes,
            "changed": self.changed,
            "runs": runs,
            "numbers": self.numbers,
            "padding": self.padding,
            "adapted": self.adapted,
            "unserved": self.unserved,
            "dynamic": self.dynamic,
            "advance": self.advance,
        }
        return Block(self.name, self.root, modules, **fields)


def _digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=16).digest()
