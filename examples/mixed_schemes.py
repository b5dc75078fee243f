"""Give different layers different schemes: FP8 for attention, int4 for the MLP.

Layers that a server fuses (q, k and v; gate and up) must have the same scheme; the plan checks it.
"""

from steelyard import oneshot
from steelyard.demo import model_folder
from steelyard.modifiers import QuantizationModifier

recipe = [
    QuantizationModifier(scheme="FP8_DYNAMIC", targets=[r"re:.*self_attn\.[qkvo]_proj$"]),
    QuantizationModifier(scheme="W4A16", targets=[r"re:.*mlp\.(gate|up|down)_proj$"]),
]
plan = oneshot(model_folder(), recipe, dry_run=True).plan
print(*str(plan).splitlines()[:6], sep="\n")

result = oneshot(model_folder(), recipe, output_dir="mixed")
print(repr(result).replace(str(result.output_dir), "mixed"))
