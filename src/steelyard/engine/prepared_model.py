"""The model before its first batch: schemes applied, and nothing rounded yet."""

from __future__ import annotations

from compressed_tensors.quantization import disable_quantization
from torch.nn import Module

from steelyard.model.applied_schemes import apply_schemes
from steelyard.model.experts import Experts
from steelyard.plan.plan import Plan

__all__ = ["prepare_model"]


def prepare_model(model: Module, plan: Plan, all_tokens: bool) -> None:
    """Apply schemes to the modules; a module runs unquantized until it is calibrated.

    all_tokens: whether input ranges of experts cover all tokens
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, Experts):
            module.all_tokens = all_tokens
    left = [*plan.config.ignore, *(item.name for item in plan.left)]
    groups = {planned.name: planned.group for planned in plan.quantized}
    apply_schemes(model, plan.config.model_copy(update={"ignore": left}), groups)
    model.apply(disable_quantization)
