"""GPTQ on modules that are decided on together: gather second moments, then solve for each.

They are a stage of a layer, or a whole layer. What a module's weight becomes are the values that
will be stored, so that the batches that flow on, and the packing, find what was decided here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter

from steelyard.algorithms.module_result import ModuleResult
from steelyard.checkpoint.figures import module_figures, with_figures
from steelyard.checkpoint.weight_errors import relative_error
from steelyard.distributed import Ranks, ThreadPool
from steelyard.fusion import fused_groups
from steelyard.kernels.gptq_rounding import GPTQResult, activation_order, solve
from steelyard.modifiers import GPTQModifier
from steelyard.modifiers.gptq import REGROUPING
from steelyard.observers.hessians import Hessians
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.plan.plan import Plan

__all__ = ["GPTQ", "Gathering", "moment_bytes", "waiting_bytes"]

_SMALL = 2048  # columns; up to here modules are solved beside each other, above one after another


class GPTQ:
    """The modifier's options, and where it tells what it had to do otherwise."""

    def __init__(self, modifier: GPTQModifier, notes: list[str]) -> None:
        self.modifier = modifier
        self.notes = notes

    def begin(
        self, modules: Mapping[str, Module], lane: Callable[[], int], ranks: Ranks, pool: ThreadPool
    ) -> Gathering:
        """Return what gathers, while it is entered or shown, for the weights among `modules`.

        Observers that weigh columns need not gather any more: H has it on its diagonal.

        lane, ranks, pool: see `Hessians`
        """
        weighed = {
            name: module
            for name, module in modules.items()
            if isinstance(module, torch.nn.Linear) and _scheme(module).weights is not None
        }
        return Gathering(self, weighed, lane, ranks, pool)


class Gathering(Hessians):
    """The modules of a stage, or of a layer."""

    def __init__(
        self,
        gptq: GPTQ,
        modules: Mapping[str, Module],
        lane: Callable[[], int],
        ranks: Ranks,
        pool: ThreadPool,
    ) -> None:
        super().__init__(modules, gptq.modifier.offload_hessians, lane, ranks, pool)
        self.gptq = gptq
        self._weighing: dict[str, ImportanceObserver] = {}
        for name, module in self.modules.items():
            observer = getattr(module, "weight_observer", None)
            if isinstance(observer, ImportanceObserver) and observer.stop_gathering(module):
                self._weighing[name] = observer

    def weigh(self, names: Collection[str]) -> None:
        """Tell the observers what was gathered for them."""
        for name, observer in self._weighing.items():
            if name in names and (tokens := self.tokens(name)):
                observer.add_importance(self.diagonal(name), tokens)

    def regroup(self, names: Collection[str]) -> None:
        """Give columns of like importance one group, where the activation order asks for that."""
        if self.gptq.modifier.actorder not in REGROUPING:
            return
        for name in self.modules.keys() & names:
            module = self.modules[name]
            order = activation_order(self.hessian(name))
            size = _scheme(module).weights.group_size or len(order)
            groups = torch.empty_like(order)
            groups[order] = torch.arange(len(order), device=order.device) // size
            module.register_parameter(
                "weight_g_idx", Parameter(groups.to(torch.int32), requires_grad=False)
            )

    def finish(self, names: Collection[str]) -> dict[str, ModuleResult]:
        """Solve for modules, whose scales must be known by now."""
        chosen = [name for name in self.modules if name in names]
        small = [name for name in chosen if self.columns(name) <= _SMALL]
        for name in small:
            self.hessian(name)  # made here: threads that share it would make it twice
        solved = self.pool.do((i, partial(self._solve, name)) for i, name in enumerate(small))
        results = dict(zip(small, solved, strict=True))
        for name in chosen:
            if name not in results:
                results[name] = self._solve(name)
        return {name: self._told(name, *results[name]) for name in chosen}

    @torch.no_grad()
    def _solve(self, name: str) -> tuple[GPTQResult, float, dict[str, Any]]:
        """Round the weight of a module; return how that went, its error, and figures."""
        module: Any = self.modules[name]
        modifier, args = self.gptq.modifier, _scheme(module).weights
        hessian = self.hessian(name).to(module.weight.device)
        result = solve(
            module.weight.data,
            hessian,
            module.weight_scale.data,
            None if args.symmetric else module.weight_zero_point.data,
            args,
            getattr(module, "weight_global_scale", None),
            block_size=modifier.block_size,
            dampening_frac=modifier.dampening_frac or 0.0,
            order=None if modifier.actorder is None else activation_order(hessian),
            g_idx=getattr(module, "weight_g_idx", None),
        )
        off = (module.weight.data.float() - result.weight.float()).square_()
        error = relative_error(float(off.sum(dtype=torch.float64)), module.weight.data)
        details = with_figures(_details(result), module_figures(module, after=result.weight))
        module._parameters["weight"] = Parameter(result.weight, requires_grad=False)
        return result, error, details

    def _told(
        self, name: str, result: GPTQResult, error: float | None, details: dict[str, Any]
    ) -> ModuleResult:
        """Note what had to be done otherwise."""
        dampening = self.gptq.modifier.dampening_frac or 0.0
        if result.fallback is not None:
            self.gptq.notes.append(f"{name}: rounded to nearest, since {result.fallback}")
        elif result.dampening_frac > dampening:
            self.gptq.notes.append(
                f"{name}: its second moments needed a dampening of {result.dampening_frac:g}"
            )
        return ModuleResult(error, self.tokens(name), details)


def moment_bytes(plan: Plan) -> int:
    """Return about how much second moments take.

    Those of a stage are there at once, as up to three matrices while they are factorised; where a
    layer goes in two passes, one of each of its inputs. Fused layers share theirs.
    """
    shared = {name for group in fused_groups(p.name for p in plan.quantized) for name in group[1:]}
    sizes: dict[str, int] = {}
    largest = 0
    for planned in plan.quantized:
        if planned.name not in shared:
            number = re.search(r"\.(\d+)\.", planned.name)
            layer = number[1] if number else planned.name
            one = 4 * planned.shape[1] ** 2
            sizes[layer] = sizes.get(layer, 0) + one
            largest = max(largest, one)
    return max(3 * largest, *sizes.values(), 0)


def waiting_bytes(plan: Plan, budget: int, least: int) -> int:
    """Return about how much batches hold that wait before the widest module of a layer.

    Beside its input in fp32: the hidden state, the one that flowed in, and the normalized one.

    least: tokens that are on their way whatever the budget, a batch for each thread
    """
    widest = max((planned.shape[1] for planned in plan.quantized), default=0)
    rate = 4 * (3 * plan.hidden + widest)
    return min(plan.tokens * rate, max(budget, least * rate))


def _scheme(module: Any) -> Any:
    return module.quantization_scheme


def _details(result: GPTQResult) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "nearest_loss": result.nearest_loss,
        "dampening_frac": result.dampening_frac,
        "dead_columns": result.dead_columns,
        "nearest_rows": result.nearest_rows,
        "fallback": result.fallback,
    }
