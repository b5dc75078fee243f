"""Store the KV cache in FP8: half the memory of bf16 for each token that a server keeps.

The scales come from calibration. Weights and their inputs are FP8 here, too.
"""

from safetensors.torch import load_file

from steelyard import oneshot
from steelyard.demo import calibration_texts, model_folder
from steelyard.modifiers import QuantizationModifier

recipe = QuantizationModifier(
    scheme="FP8",
    ignore=["lm_head"],
    kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
)
oneshot(model_folder(), recipe, calibration_texts(8), "fp8-kv", max_seq_length=256)

tensors = load_file("fp8-kv/model.safetensors")
for name in ("k_scale", "v_scale"):
    scales = [float(tensors[f"model.layers.{i}.self_attn.{name}"]) for i in range(3)]
    print(f"{name} of each layer:", ", ".join(f"{scale:.4f}" for scale in scales))
