"""Use an observer of your own: a class with one method, registered by name.

This one clips the largest magnitudes. docs/writing-an-observer.md explains the base class.
"""

from typing import ClassVar

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import distributed as dist

from steelyard import oneshot
from steelyard.demo import calibration_texts, model_folder
from steelyard.modifiers import QuantizationModifier
from steelyard.observers import Observer, ObserverOptions


class QuantileOptions(ObserverOptions):
    quantile: float = Field(default=0.999, gt=0, le=1, description="magnitudes within the range")


@Observer.register("example_quantile")
class QuantileObserver(Observer):
    """The largest quantile of magnitudes over all observations."""

    Options = QuantileOptions
    _act_sync_dict: ClassVar = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}

    def update_statistics_from_observed(self, observed):
        values = observed.float().movedim(0, -2).flatten(-2)  # (*qparam_shape, everything else)
        bound = torch.quantile(values.abs(), self.options.quantile, dim=-1)
        if self.has_statistics:
            bound = torch.maximum(bound, self.max_vals)
        self.min_vals, self.max_vals = -bound, bound


for observer in ("minmax", "example_quantile"):
    recipe = QuantizationModifier(scheme="FP8", ignore=["lm_head"], input_observer=observer)
    oneshot(model_folder(), recipe, calibration_texts(4), observer, max_seq_length=256)
    tensors = load_file(f"{observer}/model.safetensors")
    scales = [float(value) for name, value in tensors.items() if name.endswith("input_scale")]
    print(f"{observer:16} largest input scale {max(scales):.4f}")
