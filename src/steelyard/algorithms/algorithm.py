"""The base class of algorithms.

A modifier is a record of options; the algorithm that it names does the work. The engine calls the
methods below. Once, before any block:

    algorithm.rewrite(source)                 compute tensors anew, from the source's alone

for each block, in this order:

    state = algorithm.begin(block)            before any data
    algorithm.see(state, seen)                one batch at one module, in the order of the batches
    algorithm.join(state, block)              after the last batch: statistics of all ranks
    algorithm.transform(block, state)         change any tensor of the block
    algorithm.solve(block, state)             choose parameters, round weights
    algorithm.tune(block, found)              change the block once more, with all modules solved

and once, when all blocks are written:

    algorithm.finish(checkpoint)              replace stored tensors of the complete checkpoint

A recipe is a list of algorithms. Those that transform come first, each with passes of its own, so
that later algorithms see the changed block.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from steelyard.algorithms.needs import Needs
from steelyard.distributed import sendable
from steelyard.errors import RecipeError, nearest
from steelyard.model.rewrites import Rewrites
from steelyard.modifiers import Modifier
from steelyard.registry import Registry

if TYPE_CHECKING:
    from torch.nn import Module

    from steelyard.algorithms.block import Block
    from steelyard.algorithms.finished_checkpoint import FinishedCheckpoint
    from steelyard.data.samples import Samples
    from steelyard.distributed import ThreadPool
    from steelyard.model.source import Source
    from steelyard.observers.hessians import Hessians
    from steelyard.plan.plan import Plan

__all__ = ["Algorithm", "ModuleResult", "Needs", "Seen", "algorithm_of"]

Class = TypeVar("Class", bound="type[Algorithm]")


@dataclass(frozen=True)
class Seen:
    """The value of one batch at one place of a block.

    place:       input | output | query | key | value | call
    modules:     names of the modules; several if they share one input
    value:       (..., features); for a call, the pair of its positional and keyword arguments
    batch:       number of the batch in the run
    partial_sum: number of the partial sum that the batch is added to; see `kernels.partial_sums`
    turn:        number of the pass, from 0
    weights:     (tokens,), by which errors of the outputs are multiplied: a router's for an expert,
                 or the roots of `observers.token_weights`, if the algorithm needs them; None for 1
    original:    the same value in the unquantized model, if the algorithm needs it
    """

    place: str
    modules: tuple[str, ...]
    value: Any
    batch: int
    partial_sum: int = 0
    turn: int = 0
    weights: torch.Tensor | None = None
    original: torch.Tensor | None = None


@sendable
@dataclass(frozen=True)
class ModuleResult:
    """Result for one module.

    error:   squared error of the stored weight, over the sum of squares of the weight
    tokens:  number of calibration tokens that reached the module
    details: further figures of the algorithm, as JSON types; the report draws those under
             "figures" (`steelyard.checkpoint.figures`)
    """

    error: float | None
    tokens: int
    details: dict[str, Any] = field(default_factory=dict)


class Algorithm:
    """The base of all algorithms; one instance for each modifier of a recipe.

    modifier: the options, of the class that names this algorithm
    """

    registry: ClassVar[Registry[type[Algorithm]]] = Registry("algorithm")

    transforms: ClassVar[bool] = False
    """Whether `transform` changes tensors; set for a subclass that defines it."""
    rewrites: ClassVar[bool] = False
    """Whether `rewrite` replaces tensors of the source; set for a subclass that defines it."""
    finishes: ClassVar[bool] = False
    """Whether `finish` may replace tensors; set for a subclass that defines it."""
    streams: ClassVar[bool] = False
    """Whether weights can be quantized file by file: they depend on observers alone."""
    mergeable: ClassVar[bool] = False
    """Whether statistics of separate runs add up to those of one run over all data."""
    rounds_to_nearest: ClassVar[bool] = True
    """Whether every weight is stored as the code nearest to it."""

    rounds_by_hessians: ClassVar[bool] = False
    """Whether `round_ahead` rounds weights by the Hessians of their inputs."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "transform" in cls.__dict__ and "transforms" not in cls.__dict__:
            cls.transforms = True
        if "rewrite" in cls.__dict__:
            cls.rewrites = True
        if "finish" in cls.__dict__:
            cls.finishes = True

    @classmethod
    def register(cls, name: str) -> Callable[[Class], Class]:
        """Return a decorator that registers an algorithm under the name that modifiers give."""
        return Algorithm.registry.register(name)  # type: ignore[return-value]

    def __init__(self, modifier: Any) -> None:
        self.modifier = modifier

    @property
    def needs(self) -> Needs:
        return Needs()

    # -- the source ---------------------------------------------------------------------------

    def rewrite(self, source: Source, notes: list[str]) -> Rewrites:
        """Return tensors of the whole model to compute anew, before any block and without data.

        Every rank and every resumed run calls this, and must get the same.
        """
        return Rewrites()

    # -- one block ----------------------------------------------------------------------------

    def begin(self, block: Block) -> Any:
        """Return the state for one block, such as `{"largest": Largest()}`."""
        return {}

    def see(self, state: Any, seen: Seen) -> None:
        """Add the value of one batch to the state."""

    def flush(self, state: Any) -> None:
        """Add values that `see` only recorded; called while the tensors are alive."""

    def join(self, state: Any, block: Block) -> None:
        """Join the statistics of all ranks; by default each `Statistic` of a mapping."""
        if isinstance(state, Mapping):
            for name in state:
                state[name].join(block.ranks)

    def transform(self, block: Block, state: Any) -> None:
        """Change tensors of the block; every rank runs this and must compute the same values."""

    def solve(self, block: Block, state: Any) -> dict[str, ModuleResult]:
        """Choose quantization parameters and round the weights of the modules in `block.mine`."""
        return {}

    def round_ahead(
        self,
        modules: Mapping[str, Module],
        weights: Mapping[str, torch.Tensor],
        hessians: Hessians,
        pool: ThreadPool,
    ) -> dict[str, torch.Tensor]:
        """Return weights rounded about as `solve` would, in fp32, for the scores of a bit budget.

        modules:  stand-ins with a scheme each, as `algorithms.as_stored.with_scheme` makes them
        hessians: of the same modules in the original model
        """
        raise NotImplementedError

    def tune(self, block: Block, found: Mapping[str, ModuleResult]) -> dict[str, ModuleResult]:
        """Change weights and scales of a block whose modules are all solved.

        Every rank runs this and must compute the same values. Gradients are off; enable them in
        each call that is made in `block.pool`, whose threads have a mode of their own.

        found:   the results of `block.modules`
        returns: those that changed
        """
        return {}

    # -- the complete checkpoint --------------------------------------------------------------

    def check_samples(self, samples: Samples) -> None:
        """Raise a DataError for samples that `finish` cannot work with, before any work."""

    def finish(self, checkpoint: FinishedCheckpoint) -> dict[str, torch.Tensor]:
        """Return stored tensors to replace, by their names in the files; types and shapes stay.

        Called on the first rank alone, after all blocks. A killed run repeats it from the start.
        """
        return {}

    @property
    def finishing_passes(self) -> float:
        """The cost of `finish`, in passes of the samples through the model."""
        return 0.0

    # -- the whole run ------------------------------------------------------------------------

    def memory(self, plan: Plan) -> int:
        """Estimate the bytes of a block's state."""
        return 0

    def tuning_passes(self, samples: int) -> float:
        """Estimate what `tune` costs, in passes of all samples through a block."""
        return 0.0

    def idle(self, plan: Plan, adapted: Collection[int]) -> str | None:
        """Return why `transform` would change nothing, so that it can be left out; None if it may.

        adapted: indices of the modifiers that do not round weights to nearest
        """
        return None

    def prepare(self, source: Source, plan: Plan, notes: list[str]) -> None:
        """Read and check files that the modifier names, before any work."""

    def digests(self) -> dict[str, str]:
        """Return digests of those files; a run resumes only if they match.

        By default that of the file that defines the algorithm, unless it is part of this package.
        """
        kind = type(self)
        if kind.__module__.split(".")[0] == __name__.split(".")[0]:
            return {}
        try:
            text = inspect.getsource(sys.modules[kind.__module__])
        except (OSError, TypeError, KeyError):  # defined in a notebook
            return {}
        return {kind.__qualname__: hashlib.sha256(text.encode()).hexdigest()}

    def importance(self, name: str) -> tuple[torch.Tensor, int] | None:
        """Return the importance that a file holds for a module: sums of squares, tokens."""
        return None

    @property
    def gives_importance(self) -> bool:
        return False

    def files(self) -> list[tuple[Any, str]]:
        """Return the files that `save` writes at the end: kind and path."""
        return []

    def save(self) -> None:
        """Write those files."""

    def keep(self, path: Path) -> bool:
        """Write the data gathered so far for `save`; return whether a file was written."""
        return False

    def resume(self, path: Path) -> None:
        """Read the file that `keep` wrote."""

    def found(self, names: Collection[str]) -> Any:
        """Return data of this rank's modules that the other ranks need; None if there is none."""
        return None

    def receive(self, found: Any) -> None:
        """Store the data that `found` returned on another rank."""


def algorithm_of(modifier: Modifier) -> Algorithm:
    """Return a new instance of the algorithm that a modifier names."""
    name = type(modifier).algorithm
    if not name:
        raise RecipeError(
            f"{type(modifier).__name__} names no algorithm, so it would do nothing; set "
            f'`algorithm: ClassVar[str] = "..."` in the class, one of '
            f"{', '.join(Algorithm.registry.names())} or one of your own"
        )
    if name not in Algorithm.registry:
        raise RecipeError(
            f"{type(modifier).__name__} names the algorithm {name!r}, which is not registered: "
            f"{nearest(name, Algorithm.registry.names())}"
        )
    return Algorithm.registry.get(name)(modifier)
