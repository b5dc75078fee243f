"""What is decided for modules when all data has passed: parameters, rounded weights, and doubts.

Ranks that work together decide each on the weights dealt to it, and tell the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch.nn import Module, Parameter

from steelyard.algorithms.gptq import GPTQ, Gathering
from steelyard.algorithms.importance import RunImportance
from steelyard.algorithms.module_result import ModuleResult
from steelyard.checkpoint.figures import module_figures, with_figures
from steelyard.distributed import Ranks, ThreadPool
from steelyard.engine.assignment import of_weight, owners_of
from steelyard.engine.result import Result
from steelyard.engine.statistics import RunStatistics
from steelyard.errors import CalibrationError
from steelyard.modifiers import GPTQModifier
from steelyard.observers.calibration import Calibration
from steelyard.observers.lifecycle import observed_tokens
from steelyard.words import count

__all__ = ["Decisions"]


class Decisions:
    """How a run decides, and what it could not decide.

    uncalibrated: what becomes of modules that saw no token, "error" or "weights-only"
    continues:    whether a run that ends in an error can be taken up again
    """

    def __init__(
        self,
        result: Result,
        statistics: RunStatistics,
        uncalibrated: str,
        continues: bool,
        device: torch.device,
        ranks: Ranks,
        pool: ThreadPool,
    ) -> None:
        self.result = result
        self.statistics = statistics
        self.uncalibrated = uncalibrated
        self.continues = continues
        self.device = device
        self.ranks = ranks
        self.pool = pool
        self.importance = RunImportance(result.recipe)
        self.unseen: list[str] = []
        self.weights_only_schemes: dict[str, QuantizationScheme] = {}
        modifiers = [m for m in result.recipe.modifiers if isinstance(m, GPTQModifier)]
        self.gptq = GPTQ(modifiers[0], result.notes) if modifiers else None

    def begin(self, calibration: Calibration, lane: Callable[[], int]) -> Gathering | None:
        """Before any data: settle who gathers what.

        lane: see `Hessians`
        """
        self.importance.only_where_asked(calibration)
        if self.gptq is None:
            return None
        return self.gptq.begin(calibration.modules, lane, self.ranks, self.pool)

    def decide(self, calibration: Calibration, gptq: Gathering | None) -> dict[str, ModuleResult]:
        """After all data: find the parameters of the modules, and round their weights."""
        ranks, modules = self.ranks, calibration.modules
        owners = owners_of(modules, ranks.count)
        mine = [name for name in modules if owners[name] == ranks.rank]
        calibration.sync(ranks)
        self.statistics.exchange(calibration, self.device)
        if gptq is not None:
            gptq.meet(owners)
            gptq.weigh(mine)
        self.importance.exchange(calibration)
        if self.statistics.only:
            return {name: ModuleResult(None, observed_tokens(m)) for name, m in modules.items()}
        self._note_unseen(calibration)
        known = len(self.result.notes)
        if gptq is not None:
            gptq.regroup(mine)
        calibration.finish(mine)
        nearest = [n for n in mine if gptq is None or n not in gptq.modules]
        figures = {name: with_figures({}, module_figures(modules[name])) for name in nearest}
        found = {
            n: ModuleResult(None, observed_tokens(m), figures.get(n, {}))
            for n, m in modules.items()
        }
        if gptq is not None:
            found.update(gptq.finish(mine))
        self._note_unweighed(calibration)
        if ranks.count > 1:
            found.update(self._tell(modules, mine, found, known, gptq is not None))
        return found

    def _tell(
        self,
        modules: Mapping[str, Module],
        mine: list[str],
        found: Mapping[str, ModuleResult],
        known: int,
        solved: bool,
    ) -> dict[str, ModuleResult]:
        """Give the other ranks what was found for the weights dealt to this one, and take theirs.

        known:  how many notes there were before
        solved: the weights themselves have changed
        """
        notes, gathered = self.result.notes, self.importance.gathered
        own = {n: (of_weight(modules[n], solved), found[n], gathered.get(n)) for n in mine}
        results: dict[str, ModuleResult] = {}
        for rank, (news, told) in enumerate(self.ranks.gather((own, notes[known:]))):
            if rank == self.ranks.rank:
                continue
            notes += told
            for name, (tensors, result, importance) in news.items():
                for leaf, value in tensors.items():
                    tensor = value.to(self.device)
                    modules[name].register_parameter(leaf, Parameter(tensor, requires_grad=False))
                results[name] = result
                if importance is not None:
                    gathered[name] = importance
        return results

    def hopeless(self) -> list[str]:
        """Return the modules that saw nothing and have no weights to fall back to."""
        if self.uncalibrated == "error" and not self.continues:
            return self.unseen
        return [name for name in self.unseen if name not in self.weights_only_schemes]

    def _note_unseen(self, calibration: Calibration) -> None:
        for name in calibration.unseen():
            self.unseen.append(name)
            module: Any = calibration.modules[name]
            scheme = module.quantization_scheme.model_copy(
                update={"input_activations": None, "output_activations": None}
            )
            # those of a file go on, so that a run which ends in an error can be continued
            goes_on = self.uncalibrated == "weights-only" or self.continues
            if goes_on and scheme.weights is not None:
                module.quantization_scheme = scheme
                self.weights_only_schemes[name] = scheme
                for parameter in [p for p in module._parameters if _of_activations(p)]:
                    del module._parameters[parameter]

    def _note_unweighed(self, calibration: Calibration) -> None:
        if not self.result.recipe.needs_data:
            return
        for name, _, observer in calibration.observers():
            reason = getattr(observer, "fallback_reason", None)
            if reason is not None:
                self.result.notes.append(f"{name}: its columns weigh alike, since {reason}")

    @property
    def left(self) -> list[str]:
        """The modules that saw nothing, and were not to be left at that."""
        allowed = self.weights_only_schemes if self.uncalibrated == "weights-only" else ()
        return [name for name in self.unseen if name not in allowed]

    def require_all(self, kept: bool) -> None:
        """Raise if some modules are left.

        kept: whether what was calibrated is
        """
        if not self.left:
            return
        shown = "\n".join(f"  - {name}" for name in self.left)
        again = " What was calibrated is kept, and need not be again if you choose the second."
        raise CalibrationError(
            f"{count(len(self.left), 'module')} saw no token of the calibration data, so no scale "
            f'is known:\n{shown}\nUse more samples, or uncalibrated="weights-only" to quantize '
            f"only their weights, or add them to ignore.{again if kept else ''}"
        )

    def final_config(
        self,
        config: QuantizationConfig,
        stored_name: Callable[[str], str],
        class_name: Callable[[str], str],
    ) -> QuantizationConfig:
        """Return the config that the checkpoint gets; modules of a scheme of their own by name.

        stored_name: what the files call a module
        class_name:  what the class that will be loaded calls it
        """
        groups = dict(config.config_groups)
        by_scheme: dict[str, list[str]] = {}
        for name, scheme in self.weights_only_schemes.items():
            by_scheme.setdefault(scheme.model_dump_json(exclude={"targets"}), []).append(name)
        extra = {}
        for i, names in enumerate(by_scheme.values()):
            scheme = self.weights_only_schemes[names[0]]
            # vLLM starts from the names in the files, transformers from those of its class
            targets = list(dict.fromkeys([*map(stored_name, names), *map(class_name, names)]))
            extra[f"weights_only_{i}"] = scheme.model_copy(update={"targets": targets})
            self.result.notes.append(
                f"{count(len(names), 'module')} saw no token; only their weights are quantized: "
                + ", ".join(names)
            )
        return config.model_copy(update={"config_groups": {**extra, **groups}})


def _of_activations(parameter: str) -> bool:
    return parameter.startswith(("input_", "output_"))
