"""The path by which llm-compressor's users know `steelyard.calibration`."""

from steelyard.calibration import (
    apply_calibration_status,
    calibrate_input_hook,
    calibrate_key_hook,
    calibrate_output_hook,
    calibrate_query_hook,
    calibrate_value_hook,
    freeze_module_quantization,
    initialize_observer,
    observe,
    reset_quantization_status,
    update_qparams,
)

__all__ = [
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
]
