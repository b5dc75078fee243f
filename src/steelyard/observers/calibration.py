"""Observers on modules: attach, observe, compute, remove.

The functions are the steps, with the names that llm-compressor has for them; `Calibration` is the
lifecycle, a context manager that removes observers and hooks even if something raises.
"""

from steelyard.observers.hooks import (
    calibrate_input_hook,
    calibrate_key_hook,
    calibrate_output_hook,
    calibrate_query_hook,
    calibrate_value_hook,
    without_padding,
)
from steelyard.observers.lifecycle import Calibration
from steelyard.observers.steps import (
    apply_calibration_status,
    freeze_module_quantization,
    initialize_observer,
    observe,
    reset_quantization_status,
    update_qparams,
)

__all__ = [
    "Calibration",
    "apply_calibration_status",
    "calibrate_input_hook",
    "calibrate_key_hook",
    "calibrate_output_hook",
    "calibrate_query_hook",
    "calibrate_value_hook",
    "freeze_module_quantization",
    "initialize_observer",
    "observe",
    "reset_quantization_status",
    "update_qparams",
    "without_padding",
]
