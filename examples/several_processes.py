"""Quantize with all processes that torchrun starts; alone, the script is one process.

    torchrun --nproc-per-node 2 several_processes.py

The checkpoint has the same bytes for any number of processes.
"""

from steelyard import oneshot
from steelyard.demo import calibration_texts, model_folder
from steelyard.distributed import join_from_environment
from steelyard.modifiers import GPTQModifier

join_from_environment()  # does nothing outside of torchrun
result = oneshot(
    model_folder(),
    GPTQModifier(scheme="W4A16", ignore=["lm_head"]),
    dataset=calibration_texts(8),
    max_seq_length=256,
    output_dir="by-all-processes",
)
print(f"{len(result.modules)} modules quantized")
