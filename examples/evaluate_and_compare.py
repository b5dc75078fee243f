"""Try several schemes on one model, and compare what each loses and saves."""

from pathlib import Path

from steelyard import oneshot
from steelyard.demo import held_out_texts, model_folder
from steelyard.evaluate import evaluate
from steelyard.modifiers import QuantizationModifier

MODEL = model_folder()


def size(folder):
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1e6


print("scheme        MB  perplexity  KL divergence  same top token")
for scheme in ("W8A16", "FP8_DYNAMIC", "NVFP4A16", "W4A16"):
    oneshot(MODEL, QuantizationModifier(scheme=scheme, ignore=["lm_head"]), output_dir=scheme)
    found = evaluate(MODEL, scheme, held_out_texts(3), max_seq_length=256)
    print(
        f"{scheme:11} {size(scheme):4.1f} {found.perplexity:11.2f} {found.kl_divergence:14.4f}"
        f" {found.top1_agreement:15.1%}"
    )
