"""Quantize the decoder of a vision-language model, calibrated on images.

A random Llava of a few layers stands in for a real one, and random samples for its processor's
output. With a real model, pass rows with "image" and "text": its processor is found in the folder.
"""

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from steelyard import oneshot
from steelyard.modifiers import GPTQModifier

IMAGE = 9  # the token that stands for a patch of the image
torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
config = LlavaConfig(
    text_config=LlamaConfig(**sizes, vocab_size=64, num_attention_heads=4),
    vision_config=CLIPVisionConfig(**sizes, num_attention_heads=4, image_size=28, patch_size=14),
    image_token_index=IMAGE,
)
LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained("llava")

samples = [
    {
        "input_ids": torch.tensor([[1, *[IMAGE] * 4, *range(20, 30)]]),
        "attention_mask": torch.ones(1, 15, dtype=torch.int64),
        "pixel_values": torch.rand(1, 3, 28, 28),
    }
    for _ in range(4)
]
recipe = GPTQModifier(
    scheme="W4A16", ignore=["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
)
result = oneshot("llava", recipe, samples, "llava-W4A16")
print(f"{len(result.modules)} modules quantized, such as {next(iter(result.modules))}")
print("in the vision tower:", sum("vision_tower" in name for name in result.modules))
