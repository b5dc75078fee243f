"""Quantize a mixture of experts: every expert becomes a Linear layer with scales of its own.

The model is a small trained Qwen3-MoE. The router (`mlp.gate`) is not quantized.
"""

from pathlib import Path

from steelyard import oneshot
from steelyard.demo import calibration_texts
from steelyard.modifiers import GPTQModifier

MODEL = Path(__file__).parents[1] / "tests" / "support" / "expert_model"

result = oneshot(
    MODEL,
    GPTQModifier(scheme="W4A16", ignore=["lm_head", "re:.*mlp.gate$"]),
    dataset=calibration_texts(8),
    max_seq_length=256,
    output_dir="experts-W4A16",
)
experts = [name for name in result.modules if ".experts." in name]
print(f"{len(result.modules)} modules quantized, {len(experts)} of them in experts")
print("the first:", experts[0])


tokens = {name: module.tokens for name, module in result.modules.items()}
busiest = max(tokens[name] for name in experts)
print(f"the busiest expert saw {busiest / max(tokens.values()):.2f} of the tokens")
