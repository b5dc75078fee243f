"""Calibrate in parts, on several machines or days, and merge the statistics.

The merged statistics are those of one run over all the data, bit for bit.
"""

from pathlib import Path

from steelyard import oneshot
from steelyard.demo import calibration_texts, model_folder
from steelyard.engine.statistics import merge_statistics
from steelyard.modifiers import QuantizationModifier

MODEL = model_folder()
texts = calibration_texts(8)
recipe = QuantizationModifier(scheme="FP8", ignore=["lm_head"])
common = {"max_seq_length": 256, "shuffle_calibration_samples": False}

oneshot(MODEL, recipe, texts[:5], save_statistics="monday.safetensors", **common)
oneshot(MODEL, recipe, texts[5:], save_statistics="tuesday.safetensors", **common)
merge_statistics(["monday.safetensors", "tuesday.safetensors"], "week.safetensors")
oneshot(MODEL, recipe, statistics="week.safetensors", output_dir="in-parts")

oneshot(MODEL, recipe, texts, "at-once", **common)
parts, whole = (
    Path(folder, "model.safetensors").read_bytes() for folder in ("in-parts", "at-once")
)
print("in parts and at once, the same bytes:", parts == whole)
