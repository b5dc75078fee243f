"""Scripts in the style of llm-compressor's users, which run with either package.

ROOT is the import root, MODEL a folder, OUT the folder of the result.
"""

from __future__ import annotations

LOADED = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from ROOT import oneshot
from ROOT.modifiers.quantization import GPTQModifier, QuantizationModifier

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
rows = Dataset.from_list([{"text": f"def f{i}(x): return x + {i}  # line " * 9} for i in range(8)])
"""
TENSOR = "{num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}"
RECIPE = f"""
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      ignore: [lm_head]
      config_groups:
        group_0:
          weights: {TENSOR}
          input_activations: {TENSOR}
          targets: [Linear]
      kv_cache_scheme: {TENSOR}
"""

SCRIPTS = {
    "gptq, tokenized rows": LOADED
    + """
ds = rows.map(
    lambda row: tokenizer(row["text"], max_length=64, truncation=True, add_special_tokens=False),
    remove_columns=rows.column_names,
)
oneshot(
    model=model,
    dataset=ds,
    recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    max_seq_length=64,
    num_calibration_samples=8,
)
model.save_pretrained(OUT, save_compressed=True)
tokenizer.save_pretrained(OUT)
""",
    "data-free, tokenizer first": LOADED
    + """
model = oneshot(
    model=model,
    recipe=QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]),
)
tokenizer.save_pretrained(OUT)
model.save_pretrained(OUT, max_shard_size="1MB")
""",
    "weights for fp8 activations, packed": LOADED
    + """
oneshot(model=model, recipe=QuantizationModifier(scheme="W4AFP8", ignore=["lm_head"]))
model.save_pretrained(OUT, save_compressed=True, quantization_format="pack-quantized")
tokenizer.save_pretrained(OUT)
""",
    "recipe in yaml, with a cache": LOADED
    + f"""
oneshot(
    model=model,
    tokenizer=tokenizer,
    dataset=rows,
    recipe={RECIPE!r},
    max_seq_length=64,
    num_calibration_samples=8,
    pipeline="sequential",
    sequential_targets=["LlamaDecoderLayer"],
    splits={{"calibration": "train[:50%]"}},
    overwrite_cache=True,
)
model.save_pretrained(OUT, save_compressed=True)
tokenizer.save_pretrained(OUT)
""",
    "static activations, preprocessing": LOADED
    + """
oneshot(
    model=model,
    processor=tokenizer,
    dataset=rows.rename_column("text", "code"),
    preprocessing_func=lambda row: {"text": "# code" + row["code"]},
    recipe=[
        QuantizationModifier(
            scheme="FP8", ignore=["lm_head"], weight_observer="memoryless_minmax"
        )
    ],
    shuffle_calibration_samples=False,
    concatenate_data=True,
    max_seq_length=64,
    num_calibration_samples=4,
)
tokenizer.save_pretrained(OUT)
model.save_pretrained(OUT, save_compressed=True)
""",
    "ignores of other families, dataset by its short name": LOADED
    + """
import datasets
from compressed_tensors.offload import dispatch_model
from ROOT.modeling.moe.linearize import linearize_moe
from ROOT.utils import load_context

talk = [[{"from": "human", "value": row["text"]}, {"from": "gpt", "value": "# ok"}] for row in rows]
datasets.load_dataset = lambda *args, **kwargs: Dataset.from_list(
    [{"conversations": each} for each in talk]
)
with load_context():
    model = AutoModelForCausalLM.from_pretrained(MODEL, device_map="auto_offload")
linearize_moe(model)
oneshot(
    model=model,
    processor=tokenizer,
    dataset="perfectblend",
    splits="train[:8]",
    recipe=QuantizationModifier(
        targets="Linear",
        scheme="NVFP4",
        ignore=["lm_head", "re:.*vision.*", "re:.*mm_projector.*", r"re:.*mlp\\.gate\\..*"],
    ),
    max_seq_length=64,
    num_calibration_samples=8,
    batch_size=4,
)
dispatch_model(model)
sample = tokenizer("def", return_tensors="pt", return_token_type_ids=False)
model.generate(**sample, max_new_tokens=2)
model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
""",
    "schemes of compressed-tensors by target": LOADED
    + """
from compressed_tensors.quantization.quant_scheme import FP8_DYNAMIC, W4A16, QuantizationScheme

groups = {
    "attention": QuantizationScheme(targets=["re:.*self_attn.[qkvo]_proj$"], **FP8_DYNAMIC),
    "mlp": QuantizationScheme(targets=["re:.*mlp.*_proj$"], **W4A16),
}
oneshot(
    model=model,
    dataset=None,
    recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]),
    num_calibration_samples=0,
)
model.save_pretrained(OUT, save_compressed=True)
tokenizer.save_pretrained(OUT)
""",
    "smoothing, then gptq": LOADED
    + """
from ROOT.modifiers.transform.smoothquant import SmoothQuantModifier

oneshot(
    model=model,
    tokenizer=tokenizer,
    dataset=rows,
    recipe=[
        SmoothQuantModifier(smoothing_strength=0.8),
        GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    ],
    max_seq_length=64,
    num_calibration_samples=8,
)
model.save_pretrained(OUT, save_compressed=True)
tokenizer.save_pretrained(OUT)
""",
    "importance of inputs": LOADED
    + """
oneshot(
    model=model,
    tokenizer=tokenizer,
    dataset=rows,
    recipe=QuantizationModifier(
        scheme="W4A16", ignore=["lm_head"], weight_observer="imatrix_mse"
    ),
    max_seq_length=64,
    num_calibration_samples=8,
)
model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
""",
    "min-max scales": LOADED
    + """
oneshot(
    model=model,
    recipe=QuantizationModifier(
        targets=["Linear"],
        scheme="W4A16",
        ignore=["lm_head"],
        weight_observer="memoryless_minmax",
    ),
)
model.save_pretrained(OUT)
tokenizer.save_pretrained(OUT)
""",
    "from files": """
from ROOT import model_free_ptq

model_free_ptq(model_stub=MODEL, save_directory=OUT, scheme="FP8_DYNAMIC", ignore=["lm_head"])
""",
}


def script(name: str, root: str, model: str, out: str) -> str:
    """Return the text of a script for one of the packages."""
    text = SCRIPTS[name].replace("ROOT", root)
    return text.replace("MODEL", repr(model)).replace("OUT", repr(out))
