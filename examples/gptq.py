"""Round with GPTQ, calibrated on text, and measure the difference that it makes.

`dataset` may be a file (.txt, .jsonl, .parquet), a name on the hub, or any list of texts.
"""

from steelyard import oneshot
from steelyard.demo import calibration_texts, held_out_texts, model_folder
from steelyard.evaluate import evaluate
from steelyard.modifiers import GPTQModifier, QuantizationModifier

MODEL = model_folder()

nearest = QuantizationModifier(scheme="W4A16", ignore=["lm_head"])
oneshot(MODEL, nearest, output_dir="nearest")

gptq = GPTQModifier(scheme="W4A16", ignore=["lm_head"])
oneshot(MODEL, gptq, dataset=calibration_texts(16), max_seq_length=256, output_dir="gptq")

for folder in ("nearest", "gptq"):
    evaluation = evaluate(MODEL, folder, held_out_texts(8), max_seq_length=256)
    print(f"{folder:8} KL divergence {evaluation.kl_divergence:.4f} nats per token")
