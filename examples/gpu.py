"""Quantize a loaded model on the accelerator, if there is one; otherwise on the CPU.

A folder needs less memory than a loaded model: see docs/large-models.md.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steelyard import oneshot
from steelyard.demo import calibration_texts, model_folder
from steelyard.modifiers import GPTQModifier

MODEL = model_folder()
device = torch.accelerator.current_accelerator() or torch.device("cpu")
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto").to(device)
tokenizer = AutoTokenizer.from_pretrained(MODEL)

oneshot(
    model,
    GPTQModifier(scheme="W4A16", ignore=["lm_head"]),
    dataset=calibration_texts(8),
    tokenizer=tokenizer,
    max_seq_length=256,
)
model.save_pretrained("gpu-W4A16")
tokenizer.save_pretrained("gpu-W4A16")
print("quantized on:", device.type)
