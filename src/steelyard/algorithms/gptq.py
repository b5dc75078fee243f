"""GPTQ: gather the Hessian of each input, E[x x^T], then round the weights that it multiplies.

A solved weight holds the dequantized values, which later stages run with and the writer packs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter

from steelyard.algorithms.algorithm import Algorithm, ModuleResult, Needs, Seen
from steelyard.algorithms.as_stored import (
    set_importance_power,
    stored_parameters,
    weight_observers,
)
from steelyard.algorithms.block import Block
from steelyard.algorithms.nearest import Nearest
from steelyard.checkpoint.figures import module_figures, with_figures
from steelyard.checkpoint.weight_errors import relative_error, weight_error
from steelyard.distributed import ThreadPool
from steelyard.formats.scale_codes import is_exponents
from steelyard.fusion import fused_groups
from steelyard.kernels.gptq_rounding import GPTQResult, activation_order, solve
from steelyard.kernels.hessian import output_square
from steelyard.model.freed_memory import return_memory
from steelyard.modifiers import GPTQModifier
from steelyard.modifiers.gptq import REGROUPING
from steelyard.observers.hessians import Hessians
from steelyard.observers.steps import args_for, has_coarse_inputs
from steelyard.plan.plan import Plan

__all__ = ["GPTQ", "hessian_bytes"]

_IMPORTANCE_POWER = 0.5  # of E[x^2], as the weight of a column whose error others make up for
_UNSHIFTED = (
    "no drift correction of modules whose inputs have few bits, and powers of two as scales"
)
_AT_ONCE = 4  # modules per thread; Hessians of more would only take memory
_SMALL = 2048  # columns; modules up to this size are solved in parallel, larger ones one by one


@Algorithm.register("gptq")
class GPTQ(Nearest):
    """Solves modules in the order of their calls; each sees the solved modules before it."""

    streams = False
    mergeable = False
    rounds_to_nearest = False
    rounds_by_hessians = True
    modifier: GPTQModifier

    @property
    def needs(self) -> Needs:
        return Needs(
            inputs=True,
            staged=True,
            propagate=True,
            original_inputs=self.modifier.drift_correction,
            token_weights=self.modifier.token_weights,
        )

    def begin(self, block: Block) -> Hessians:
        """Create the Hessians; observers need not gather E[x^2], which is their diagonal."""
        weighed = {
            name: module
            for name, module in block.modules.items()
            if isinstance(module, torch.nn.Linear) and _scheme(module).weights is not None
        }
        block.calibration.stop_gathering(weighed)
        for _, _, observer in block.calibration.observers():
            set_importance_power(observer, _IMPORTANCE_POWER)
        return Hessians(weighed, self.modifier.offload_hessians, block.ranks, block.pool)

    def see(self, state: Hessians, seen: Seen) -> None:
        terms = (seen.partial_sum, seen.weights, seen.original, seen.batch)
        state.see(seen.modules, seen.value, *terms)

    def flush(self, state: Hessians) -> None:
        state.flush()

    def join(self, state: Hessians, block: Block) -> None:
        state.close()
        state.join(block.owners)
        state.shrink(block.owners)
        for name in block.mine:
            block.calibration.add_importance(name, partial(state.importance, name))

    def memory(self, plan: Plan) -> int:
        return hessian_bytes(plan, self.modifier.drift_correction)

    def solve(self, block: Block, state: Hessians) -> dict[str, ModuleResult]:
        mine = [name for name in state.modules if name in block.mine]
        coarse = any(map(_has_noisy_inputs, state.modules.values()))
        if self.modifier.drift_correction and coarse and _UNSHIFTED not in block.notes:
            block.notes.append(_UNSHIFTED)
        if self.modifier.actorder in REGROUPING:
            self._prepare(state, mine)
            for name in mine:
                self._regroup(state, name)
        results = super().solve(block, state)
        rounds = list(_rounds(mine, state, _AT_ONCE * block.pool.count))
        for some in rounds:
            if len(rounds) > 1:  # of experts: what one round frees, threads of the next cannot fill
                return_memory()
            self._prepare(state, some)
            solved = block.pool.do(
                (i, partial(self._solve, state, name)) for i, name in enumerate(some)
            )
            for name, (result, error, details) in zip(some, solved, strict=True):
                if result.fallback is None:  # else the writer rounds it to nearest
                    block.change(f"{name}.weight", result.weight)
                if (note := _note(name, result, self._dampening(state, name))) is not None:
                    block.notes.append(note)
                results[name] = ModuleResult(error, state.tokens(name), details)
                state.release(name)
        return results

    def round_ahead(
        self,
        modules: Mapping[str, Module],
        weights: Mapping[str, torch.Tensor],
        hessians: Hessians,
        pool: ThreadPool,
    ) -> dict[str, torch.Tensor]:
        """Round as `solve` does, without drift: what earlier layers change is not known yet."""
        squares = {n: found for n in weights if (found := hessians.importance(n)) is not None}
        observers = weight_observers(modules, weights, squares, _IMPORTANCE_POWER)

        def rounded(name: str) -> torch.Tensor:
            hessian = hessians.hessian(name)
            qparams = stored_parameters(modules[name], observers[name])
            args, modifier = observers[name].args, self.modifier
            return solve(
                weights[name].float(),
                hessian,
                qparams["scale"],
                None if args.symmetric else qparams["zero_point"],
                args,
                qparams.get("global_scale"),
                block_size=modifier.block_size,
                dampening_frac=modifier.dampening_frac or 0.0,
                order=None if modifier.actorder is None else activation_order(hessian),
                rounds=modifier.refinements,
            ).weight

        solved = pool.do((i, partial(rounded, name)) for i, name in enumerate(observers))
        return dict(zip(observers, solved, strict=True))

    def _prepare(self, state: Hessians, names: Sequence[str]) -> None:
        modifier = self.modifier
        state.prepare(names, modifier.dampening_frac or 0.0, modifier.held_out_dampening)

    def _dampening(self, state: Hessians, name: str) -> float:
        """Return the dampening to solve a module with, after `_prepare`."""
        chosen = state.dampening_frac(name)
        return (self.modifier.dampening_frac or 0.0) if chosen is None else chosen

    def _regroup(self, state: Hessians, name: str) -> None:
        """Put columns of similar importance into one group."""
        module = state.modules[name]
        order = activation_order(state.hessian(name))
        size = _scheme(module).weights.group_size or len(order)
        groups = torch.empty_like(order)
        groups[order] = torch.arange(len(order), device=order.device) // size
        module.register_parameter(
            "weight_g_idx", Parameter(groups.to(torch.int32), requires_grad=False)
        )

    @torch.no_grad()
    def _solve(self, state: Hessians, name: str) -> tuple[GPTQResult, float, dict[str, Any]]:
        """Return the rounded weight of a module, its error, and figures."""
        module: Any = state.modules[name]
        modifier, args = self.modifier, _scheme(module).weights
        hessian = state.hessian(name).to(module.weight.device)
        target, drift = self._target(state, name)
        result = solve(
            module.weight.data,
            hessian,
            module.weight_scale.data,
            None if args.symmetric else module.weight_zero_point.data,
            args,
            getattr(module, "weight_global_scale", None),
            block_size=modifier.block_size,
            dampening_frac=self._dampening(state, name),
            order=None if modifier.actorder is None else activation_order(hessian),
            g_idx=getattr(module, "weight_g_idx", None),
            target=target,
            rounds=modifier.refinements,
        )
        signal = output_square(module.weight.data, hessian)
        if result.fallback is not None:
            error = weight_error(module) or 0.0
            details = _details(result, 0.0, signal)
            return result, error, with_figures(details, module_figures(module))
        self._rounded(state, name, target, hessian, result)
        # contiguous, since a module that is offloaded to disk writes it to a file
        scale = Parameter(result.scale.contiguous(), requires_grad=False)
        module.register_parameter("weight_scale", scale)
        off = (module.weight.data.float() - result.weight.float()).square_()
        error = relative_error(float(off.sum(dtype=torch.float64)), module.weight.data)
        figures = module_figures(module, after=result.weight)
        return result, error, with_figures(_details(result, drift, signal), figures)

    def _rounded(
        self,
        state: Hessians,
        name: str,
        target: torch.Tensor | None,
        hessian: torch.Tensor,
        result: GPTQResult,
    ) -> None:
        """Called once for each weight that GPTQ rounded; target: None for the weight's own."""

    def _target(self, state: Hessians, name: str) -> tuple[torch.Tensor | None, float]:
        """Return the weight to round to, None for its own, and the factor of the shift."""
        if _has_noisy_inputs(state.modules[name]):
            return None, 0.0
        target, factor = state.shifted(name) or (None, 0.0)
        return (target, factor) if factor else (None, 0.0)


def _rounds(names: Sequence[str], state: Hessians, most: int) -> Iterator[list[str]]:
    """Yield the modules to solve in parallel, in order; large ones alone."""
    some: list[str] = []
    for name in names:
        large = state.columns(name) > _SMALL
        if some and (large or len(some) == most):
            yield some
            some = []
        some.append(name)
        if large:
            yield some
            some = []
    if some:
        yield some


def hessian_bytes(plan: Plan, drift: bool = False) -> int:
    """Estimate the bytes of Hessians.

    A stage holds those of its inputs, up to three matrices each while they are factorized; a layer
    that runs in two passes holds those of all its inputs. Fused layers share one. The drift has
    sums for even and odd batches: six matrices more.
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
    return max((9 if drift else 3) * largest, *sizes.values(), 0)


def _scheme(module: Any) -> Any:
    return module.quantization_scheme


def _has_noisy_inputs(module: Module) -> bool:
    """Whether inputs are rounded as in MXFP4.

    What has changed in them is mostly noise then, which a least-squares fit answers with smaller
    outputs, layer after layer.
    """
    inputs = args_for(module, "input")
    if inputs is None or inputs.scale_dtype is None:
        return False
    return has_coarse_inputs(module) and is_exponents(inputs.scale_dtype)


def _note(name: str, result: GPTQResult, dampening_frac: float) -> str | None:
    """Return what the report should say about a solved module, if anything."""
    if result.fallback is not None:
        return f"{name}: rounded to nearest, since {result.fallback}"
    if result.dampening_frac > dampening_frac:
        return f"{name}: its Hessian needed a dampening of {result.dampening_frac:g}"
    return None


def _details(result: GPTQResult, drift: float, signal: float) -> dict[str, Any]:
    """Return figures; the output error is the loss over the square of the outputs, tr(W H W^T)."""
    return {
        "output_error": result.loss / signal if signal > 0 else None,
        "drift_factor": drift,
        "loss": result.loss,
        "nearest_loss": result.nearest_loss,
        "dampening_frac": result.dampening_frac,
        "dead_columns": result.dead_columns,
        "nearest_rows": result.nearest_rows,
        "fallback": result.fallback,
    }
