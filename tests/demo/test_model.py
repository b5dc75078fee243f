"""The demo model as it ships: whole, small, and it knows its language."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from bigram import Bigram
from transformers import AutoModelForCausalLM, AutoTokenizer

from steelyard.demo import calibration_texts, held_out_texts, model_folder
from steelyard.model.source import Source

FOLDER = model_folder()
FILES = ["config.json", "generation_config.json", "model.safetensors"]
FILES += ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_folder_holds_what_a_server_needs_and_is_small() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8_000_000


def test_every_weight_takes_groups_and_blocks_of_128(model) -> None:
    shapes = {n: m.weight.shape for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(shapes) == 7 * model.config.num_hidden_layers + 1
    assert {n for n, shape in shapes.items() if shape[0] % 128 or shape[1] % 128} == set()


def test_our_source_reads_what_transformers_reads(model) -> None:
    source = Source.open(FOLDER)
    assert source.dtype == torch.bfloat16
    expected = {n: p for n, p in model.named_parameters() if n != "lm_head.weight"}
    with source.loaded(source.model, ""):
        found = {n: p for n, p in source.model.named_parameters() if n != "lm_head.weight"}
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value.float(), expected[name], rtol=0, atol=0, msg=name)


def test_tokenizer_gives_back_what_it_was_given(tokenizer, model) -> None:
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    for text in [*held_out_texts(3), "\x00é\t漢字 \r\n\n   x"]:
        ids = tokenizer(text).input_ids
        assert 0 not in ids  # nothing is added, and the end of a text is no text
        assert tokenizer.decode(ids) == text


@torch.no_grad()
def test_perplexity_is_far_below_that_of_a_bigram_model(tokenizer, model) -> None:
    """On texts of the installed Python, of which some versions moved between files since 3.11."""
    seen = tokenizer("".join(calibration_texts(1500))).input_ids
    texts = tokenizer(held_out_texts(24, characters=1200)).input_ids
    losses, pairs = [], []
    for ids in texts:
        row = torch.tensor(ids)
        logits = model(input_ids=row[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="none"))
        pairs.append(torch.stack([row[:-1], row[1:]]))
    loss = torch.cat(losses)
    assert loss.numel() > 4000
    bigram = Bigram(torch.tensor(seen), len(tokenizer)).perplexity(*torch.cat(pairs, 1))
    assert math.exp(loss.mean()) < bigram / 2


def test_report_is_of_this_model(model) -> None:
    report = Path(__file__).parents[2] / "benchmarks/results/demo-model.json"
    stated = json.loads(report.read_text("utf-8"))
    assert stated["parameters"] == model.num_parameters()
    assert stated["perplexity"] < stated["bigram_perplexity"] / 2
