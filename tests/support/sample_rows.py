"""Texts, a tokenizer for them, and the samples that a dataset gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.data.samples import Samples, load_samples

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

WORDS = ["<s>", "<unk>", *(f"w{i}" for i in range(40))]
TEXTS = [f"w{i} w{i + 1} w{i + 2}" for i in range(10)]
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def make_tokenizer(bos: bool = False) -> Any:
    """Return a tokenizer of whole words; `wN` has the id N + 2."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>"
    )


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) if word in WORDS else 1 for word in text.split()]


def unused() -> Any:
    raise AssertionError("nothing here needs a tokenizer")


def take(dataset: Any, *, tokenizer: Callable[[], Any] = make_tokenizer, **options: Any) -> Samples:
    return load_samples(dataset, tokenizer=tokenizer, **{"shuffle": False, **options})


def rows(samples: Samples) -> list[list[int]]:
    assert all(batch.keys() == {"input_ids"} for batch in samples.batches)
    batches = [batch["input_ids"] for batch in samples.batches]
    assert all(batch.dtype == torch.int64 and batch.ndim == 2 for batch in batches)
    found = [row.tolist() for batch in batches for row in batch]
    assert samples.num_samples == len(found)
    assert samples.num_tokens == sum(map(len, found))
    return found


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# -- forms ------------------------------------------------------------------------------------
