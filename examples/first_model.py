"""Quantize a model without data, then load the checkpoint and generate with it.

MODEL is the small model of the package; any folder or name on the hub works the same.
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

from steelyard import oneshot
from steelyard.demo import model_folder
from steelyard.modifiers import QuantizationModifier

MODEL = model_folder()
OUTPUT = "first-model-W4A16"

result = oneshot(MODEL, QuantizationModifier(scheme="W4A16", ignore=["lm_head"]), output_dir=OUTPUT)
print(result)

model = AutoModelForCausalLM.from_pretrained(OUTPUT)
tokenizer = AutoTokenizer.from_pretrained(OUTPUT)
prompt = tokenizer("def __init__(self", return_tensors="pt", return_token_type_ids=False)
print("generated:", repr(tokenizer.decode(model.generate(**prompt, max_new_tokens=4)[0])))
