"""Weight the columns of every matrix by the inputs that they multiply.

With calibration data the observer `optimal` spends the precision of int4 where the inputs are
large, and still rounds to nearest: much cheaper than GPTQ.
"""

from steelyard import oneshot
from steelyard.demo import calibration_texts, held_out_texts, model_folder
from steelyard.evaluate import evaluate
from steelyard.modifiers import IMatrixGatherer, QuantizationModifier

MODEL = model_folder()

quantize = QuantizationModifier(scheme="W4A16", ignore=["lm_head"], weight_observer="optimal")
oneshot(MODEL, quantize, output_dir="without-data")

recipe = [IMatrixGatherer(ignore=["lm_head"]), quantize]
oneshot(MODEL, recipe, dataset=calibration_texts(16), max_seq_length=256, output_dir="importance")

for folder in ("without-data", "importance"):
    evaluation = evaluate(MODEL, folder, held_out_texts(8), max_seq_length=256)
    print(f"{folder:12} KL divergence {evaluation.kl_divergence:.4f} nats per token")
