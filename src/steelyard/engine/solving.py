"""Solves a calibrated block: quantization parameters, rounded weights, modules without tokens.

Each rank solves the weights assigned to it, and sends the results to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match
from torch.nn import Module, Parameter

from steelyard.algorithms import Algorithm, Block, ModuleResult, needs_data
from steelyard.distributed import Ranks, ThreadPool
from steelyard.engine.assignment import of_weight, owners_of
from steelyard.engine.block_work import Work
from steelyard.engine.parts import Flow, Part
from steelyard.engine.result import Result
from steelyard.engine.statistics import RunStatistics
from steelyard.engine.uncalibratable import mend_unserved, replace_scheme
from steelyard.errors import CalibrationError
from steelyard.observers.calibration import Calibration
from steelyard.observers.expert_sharing import share_among_experts, starved_experts
from steelyard.words import count

__all__ = ["Solver"]


class Solver:
    """The algorithms of a run, and the modules that they could not solve.

    claims:       index in the recipe of the modifier that quantizes each module
    uncalibrated: the options `uncalibrated` and `uncalibratable`
    resumable:    whether a run that ends in an error can be resumed
    """

    def __init__(
        self,
        algorithms: Sequence[Algorithm],
        result: Result,
        statistics: RunStatistics,
        uncalibrated: tuple[str, str],
        resumable: bool,
        device: torch.device,
        ranks: Ranks,
        pool: ThreadPool,
    ) -> None:
        self.algorithms = list(algorithms)
        self.result = result
        self.statistics = statistics
        self.uncalibrated, self.uncalibratable = uncalibrated
        self.resumable = resumable
        self.device = device
        self.ranks = ranks
        self.pool = pool
        self.unseen: list[str] = []
        self._without_drift: set[str] = set()  # reasons
        self._dynamic: dict[str, str] = {}  # modules that need dynamic scales, found by transforms
        self.own_schemes: dict[str, QuantizationScheme] = {}  # in place of the recipe's
        self.claims = {planned.name: planned.modifier for planned in result.plan.quantized}
        self.claims |= dict.fromkeys(result.plan.attention, result.plan.attention_modifier)
        self.adapted = {n for n, i in self.claims.items() if not algorithms[i].rounds_to_nearest}
        self._quantizing = {
            index
            for index, algorithm in enumerate(self.algorithms)
            if algorithm.modifier.quantization_config() is not None
        }

    # -- algorithms and their modules ---------------------------------------------------------

    def needs(self, name: str) -> bool:
        """Whether any algorithm needs this field of `Needs`."""
        return any(getattr(algorithm.needs, name) for algorithm in self.algorithms)

    def solving_needs(self, name: str) -> bool:
        """Whether any algorithm that solves modules needs this field of `Needs`."""
        return any(getattr(algorithm.needs, name) for algorithm in self._solving)

    @property
    def _solving(self) -> list[Algorithm]:
        return [
            algorithm
            for index, algorithm in enumerate(self.algorithms)
            if index in self._quantizing or not algorithm.transforms
        ]

    @property
    def passes(self) -> int:
        """Number of passes to observe a block."""
        return max((algorithm.needs.passes for algorithm in self._solving), default=1)

    @property
    def transforms(self) -> list[Algorithm]:
        return [algorithm for algorithm in self.algorithms if algorithm.transforms]

    @property
    def tunes(self) -> bool:
        return self.solving_needs("tuning")

    def block(
        self,
        name: str,
        root: Module,
        without: Module | None,
        calibration: Calibration | None,
        **more: Any,
    ) -> Block:
        """Return a block with all of its modules; `Block.part` selects those of an algorithm."""
        left_out = set() if without is None else set(without.modules())
        within = {
            f"{name}.{path}".strip("."): module
            for path, module in root.named_modules()
            if module not in left_out
        }
        return Block(
            name,
            root,
            within,
            calibration=calibration,
            owners=owners_of(calibration.modules if calibration else {}, self.ranks.count),
            ranks=self.ranks,
            pool=self.pool,
            device=self.device,
            notes=self.result.notes,
            adapted=self.adapted,
            unserved=self.uncalibratable,
            dynamic=self._dynamic,
            **more,
        )

    def _claimed(self, algorithm: Algorithm, modules: Mapping[str, Module]) -> list[str]:
        """Return the modules that an algorithm solves, or that its targets match."""
        index = self.algorithms.index(algorithm)
        if index in self._quantizing:
            return [name for name in modules if self.claims.get(name) == index]
        return self._matched(algorithm, modules)

    def _matched(self, algorithm: Algorithm, modules: Mapping[str, Module]) -> list[str]:
        modifier = algorithm.modifier
        return [
            name
            for name, module in modules.items()
            if name and is_match(name, module, modifier.targets, modifier.ignore)
        ]

    def begin(self, block: Block) -> Work:
        """Start the algorithms that solve a block, before any data."""
        modules = block.calibration.modules
        work = Work(
            [
                (each, block.part(self._claimed(each, modules), runs=each.needs.gradients))
                for each in self._solving
            ]
        )
        block.calibration.drop_unweighed()
        return work

    def begin_transform(self, algorithm: Algorithm, block: Block) -> Work | None:
        """Start an algorithm that transforms a block; None if it has nothing to do there."""
        outside = algorithm.needs.layers and not block.name  # of layers
        names = [] if outside else self._matched(algorithm, block.within)
        return Work([(algorithm, block.part(names))], transforming=True) if names else None

    # -- solving ------------------------------------------------------------------------------

    def solve(self, block: Block, work: Work) -> dict[str, ModuleResult]:
        """Find the quantization parameters of an observed block, and round its weights."""
        ranks, calibration, modules = self.ranks, block.calibration, block.calibration.modules
        calibration.sync(ranks)
        self.statistics.exchange(calibration, self.device)
        work.join()
        work.transform()
        if self.statistics.only:
            return {name: ModuleResult(None, calibration.tokens(name)) for name in modules}
        share_among_experts(calibration)
        self.result.notes += starved_experts(calibration)
        self._note_unseen(calibration)
        mended = mend_unserved(block)
        self.own_schemes |= mended
        work.release([name for name in mended if name not in modules])
        known = len(self.result.notes)
        found = work.solve()
        self._note_unweighed(calibration)
        if ranks.count > 1:
            found.update(self._exchange(block, found, known))
        return found

    def tune(
        self, block: Block, modules: Mapping[str, Module], found: Mapping[str, ModuleResult]
    ) -> dict[str, ModuleResult]:
        """Tune a block whose modules are all solved; return the results that changed."""
        changed: dict[str, ModuleResult] = {}
        for algorithm in self._solving:
            if algorithm.needs.tuning and not self.statistics.only:
                names = self._claimed(algorithm, modules)
                changed |= algorithm.tune(block.part(names), {name: found[name] for name in names})
        return changed

    def _exchange(
        self, block: Block, found: Mapping[str, ModuleResult], known: int
    ) -> dict[str, ModuleResult]:
        """Send the results of this rank's modules, and receive those of the others.

        known: number of notes before solving
        """
        notes, modules = self.result.notes, block.calibration.modules
        mine = [name for name in modules if block.owners[name] == self.ranks.rank]
        sent = {f"{name}.weight" for name in mine}
        own = {
            name: (of_weight(modules[name], f"{name}.weight" in block.changed), found[name])
            for name in mine
        }
        plain = {name: block.tensor(name) for name in sorted(block.changed - sent)}
        more = [algorithm.found(mine) for algorithm in self.algorithms]
        results: dict[str, ModuleResult] = {}
        sending = (own, plain, notes[known:], more)
        for rank, (received, changed, added, others) in enumerate(self.ranks.gather(sending)):
            if rank == self.ranks.rank:
                continue
            notes += added
            for name, value in changed.items():
                block.change(name, value)
            for name, (tensors, result) in received.items():
                for leaf, value in tensors.items():
                    tensor = value.to(self.device)
                    modules[name].register_parameter(leaf, Parameter(tensor, requires_grad=False))
                results[name] = result
            for algorithm, theirs in zip(self.algorithms, others, strict=True):
                if theirs is not None:
                    algorithm.receive(theirs)
        return results

    def note_drift(self, part: Part, flow: Flow, staged: bool) -> None:
        """Note blocks whose modules are solved without drift correction: the first per reason."""
        if not self.solving_needs("original_inputs") or not flow.forwards:
            return
        if not staged:
            reason = "its modules are not solved in the order of their calls"
        elif not flow.originals:
            reason = "experts are quantized, or a module of it has a forward of its own"
        else:
            return
        if reason not in self._without_drift:
            self._without_drift.add(reason)
            outside = "the modules outside of the layers" if part.without else "the model"
            where = part.name or outside
            self.result.notes.append(f"no drift correction in {where}, since {reason}")

    # -- modules without tokens ---------------------------------------------------------------

    def unrecoverable(self) -> list[str]:
        """Return the modules that saw no token and have no weights to fall back to."""
        if self.uncalibrated == "error" and not self.resumable:
            return self.unseen
        return [name for name in self.unseen if name not in self.own_schemes]

    def _note_unseen(self, calibration: Calibration) -> None:
        for name in calibration.unseen():
            self.unseen.append(name)
            module: Any = calibration.modules[name]
            scheme = module.quantization_scheme.model_copy(
                update={"input_activations": None, "output_activations": None}
            )
            # a resumable run keeps it even with "error": the user may resume with "weights-only"
            continues = self.uncalibrated == "weights-only" or self.resumable
            if continues and scheme.weights is not None:
                self.own_schemes[name] = scheme
                replace_scheme(module, scheme, "input_", "output_")

    def _note_unweighed(self, calibration: Calibration) -> None:
        if not needs_data(self.algorithms):
            return
        for name, _, observer in calibration.observers():
            if (reason := getattr(observer, "fallback_reason", None)) is not None:
                self.result.notes.append(f"{name}: columns are not weighted, since {reason}")

    @property
    def uncalibrated_modules(self) -> list[str]:
        """The modules that saw no token and may not fall back to weights only."""
        allowed = self.own_schemes if self.uncalibrated == "weights-only" else ()
        return [name for name in self.unseen if name not in allowed]

    def require_all(self, kept: bool) -> None:
        """Raise if some modules saw no token.

        kept: whether the journal keeps the calibrated modules
        """
        if not self.uncalibrated_modules:
            return
        shown = "\n".join(f"  - {name}" for name in self.uncalibrated_modules)
        again = ' The calibrated modules are kept: a run with uncalibrated="weights-only" resumes.'
        raise CalibrationError(
            f"{count(len(self.uncalibrated_modules), 'module')} saw no token of the calibration "
            f"data, so no scale is known:\n{shown}\nUse more samples, or "
            'uncalibrated="weights-only" to quantize only their weights, or add them to ignore.'
            f"{again if kept else ''}"
        )
