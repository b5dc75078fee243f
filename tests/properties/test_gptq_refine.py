"""Refining never raises the error, step by step, whatever the weight, the inputs and the format."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_problems import loss_of, qparams_of
from gptq_strategies import every_format, problems
from hypothesis import given, settings

from steelyard.kernels import compiled_gptq
from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.gptq_refine import ScaleSteps, refine_block
from steelyard.kernels.gptq_rounding import activation_order, solve


@every_format
@settings(max_examples=40)
@given(problem=problems())
def test_a_refined_result_is_never_worse(args: QuantizationArgs, problem: dict[str, Any]) -> None:
    weight, hessian = problem.pop("weight"), problem.pop("hessian")
    order = activation_order(hessian) if problem.pop("ordered") else None
    scale, zero_point, global_scale = qparams_of(weight, args)
    given_ = (weight, hessian, scale, zero_point, args, global_scale)
    plain, result = (solve(*given_, order=order, rounds=r, **problem) for r in (0, 2))
    assert result.loss <= result.nearest_loss
    assert bool(result.weight.isfinite().all()) and bool((result.scale.float() > 0).all())
    grid = Grid.of(weight, result.scale, zero_point, args, global_scale, False, None)
    stored = grid.stored(result.weight)
    left = stored != result.weight
    assert torch.equal(result.weight[left], weight[left])
    ours, theirs = (loss_of(weight, r.weight, hessian) for r in (result, plain))
    floor = 1e-6 * float(hessian.double().abs().max()) * weight.double().square().sum(1)
    assert bool((ours <= theirs * (1 + 1e-5) + floor).all()), (ours, theirs)


@every_format
@settings(max_examples=30)
@given(problem=problems())
def test_no_step_raises_the_error(args: QuantizationArgs, problem: dict[str, Any]) -> None:
    """Group by group: the error of each row falls or stays, for both kernels."""
    weight, hessian = problem["weight"], problem["hessian"]
    mean = hessian.diagonal().mean()
    if float(mean) == 0:
        return
    damped = hessian / mean
    damped.diagonal().add_(0.01)
    scale, zero_point, global_scale = qparams_of(weight, args)
    grid = Grid.of(weight, scale, zero_point, args, global_scale, False, None)
    steps = ScaleSteps.of(args, scale, global_scale)
    values = grid.stored(weight).float().t().contiguous()
    target = weight.float().t().contiguous()
    errors = target - values
    floor = 1e-6 * weight.double().square().sum(1) * damped.diagonal().max()
    before = loss_of(target.t(), values.t(), damped)
    for group in grid.group.unique().tolist():
        columns = (grid.group == group).nonzero().flatten()
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        fit = grid.movable and not grid.tight
        if problem["backend"] == "reference":
            sums, within = (damped @ errors)[part], damped[part, part].contiguous()
            refine_block(within, sums, grid.columns(part), steps, values[part], errors[part], fit)
        else:
            compiled_gptq.refine(damped, target, grid, steps, values, fit, len(columns), part)
        after = loss_of(target.t(), values.t(), damped)
        assert bool((after <= before * (1 + 1e-6) + floor).all()), (before, after)
        before = after
