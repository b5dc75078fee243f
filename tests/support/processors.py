"""Small processors of transformers, with a tokenizer of words w0, w1, ... and an image."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from multimodal import IMAGE
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> "
    "{% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def tokenizer() -> Any:
    vocabulary = {f"w{i}": i for i in range(IMAGE)} | {"<image>": IMAGE, "<unk>": IMAGE + 1}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="w0",
        additional_special_tokens=["<image>"],
    )


def llava() -> Any:
    size = {"height": 28, "width": 28}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def whisper() -> Any:
    ears = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=500)
    return transformers.WhisperProcessor(ears, tokenizer())


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8))
