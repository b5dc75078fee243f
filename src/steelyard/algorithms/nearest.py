"""Round to nearest: observers choose the scales, and weights are rounded to them when stored."""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import DynamicType, QuantizationScheme

from steelyard.algorithms.algorithm import Algorithm, ModuleResult, Needs
from steelyard.algorithms.block import Block
from steelyard.checkpoint.figures import module_figures, with_figures
from steelyard.modifiers import QuantizationModifier
from steelyard.observers import Observer

__all__ = ["Nearest"]


@Algorithm.register("nearest")
class Nearest(Algorithm):
    """Computes the parameters of weights, activations and attention states from observers."""

    streams = True
    mergeable = True
    modifier: QuantizationModifier

    @property
    def needs(self) -> Needs:
        config = self.modifier.config
        cache, schemes = config.kv_cache_scheme, config.config_groups.values()
        return Needs(
            activations=(cache is not None and cache.dynamic is not True)
            or any(map(_has_static_activations, schemes)),
            importance=any(map(_weighs_columns, schemes)),
        )

    def solve(self, block: Block, state: Any) -> dict[str, ModuleResult]:
        mine = block.mine
        block.calibration.compute(block.modules, mine)
        return {
            name: ModuleResult(
                None,
                block.calibration.tokens(name),
                with_figures({}, module_figures(module)) if name in mine else {},
            )
            for name, module in block.modules.items()
        }


def _has_static_activations(scheme: QuantizationScheme) -> bool:
    return any(
        args is not None and args.dynamic in (False, DynamicType.LOCAL)
        for args in (scheme.input_activations, scheme.output_activations)
    )


def _weighs_columns(scheme: QuantizationScheme) -> bool:
    weights = scheme.weights
    if weights is None or weights.observer is None:
        return False
    observer = Observer.get_value_from_registry(weights.observer)
    return bool(getattr(observer, "needs_importance", False))
