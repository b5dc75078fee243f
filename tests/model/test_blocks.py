"""Layer by layer, with nothing quantized, equals the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_runs import plain_logits, run_in_sequence
from families import FAMILIES, small_model, token_batches
from torch.testing import assert_close

from steelyard.errors import PipelineError
from steelyard.model.blocks import LayerSequence, decoder_layers
from steelyard.model.precision import computing_in
from steelyard.model.source import Source


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_model_gives_the_plain_logits(family: str) -> None:
    model, batches = small_model(family), token_batches()
    expected = plain_logits(model, batches)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert_close(run_in_sequence(Source.open(model), batches), expected, rtol=0, atol=0)
    after = dict(model.named_parameters())
    assert_close(after, before, rtol=0, atol=0)
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(model)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_gives_the_plain_logits(family: str, tmp_path: Path) -> None:
    model, batches = small_model(family), token_batches()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    expected = plain_logits(model, batches)
    source = Source.open(tmp_path)
    assert not source.in_memory  # not even experts, which its class stacks
    assert_close(run_in_sequence(source, batches), expected, rtol=0, atol=0)
    assert not source.in_memory, "weights were kept"


def test_masks_are_not_kept_once_per_batch() -> None:
    model = small_model("gemma3")
    sequence = LayerSequence(model)
    with computing_in(model, torch.float32):
        started = sequence.start([torch.arange(3, 23)[None] for _ in range(5)], lambda: None)
    masks = {id(batch.calls[0].kwargs["attention_mask"]) for batch in started}
    assert len(masks) == 1


def test_a_model_that_meddles_between_layers_is_refused() -> None:
    class Meddling(torch.nn.ModuleList):
        def __iter__(self) -> Any:
            for layer in super().__iter__():
                yield lambda hidden, layer=layer, **kwargs: layer(hidden * 2, **kwargs)

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                return self
            return super().__getitem__(index)

    model = small_model("llama")
    layers = model.model.layers
    model.model.layers = Meddling(layers)
    sequence = LayerSequence(model)
    sequence.layers = layers
    with computing_in(model, torch.float32), pytest.raises(PipelineError, match=r"layer 1.*basic"):
        sequence.start([torch.arange(3, 9)[None]], lambda: None)


def test_a_model_without_layers_is_refused() -> None:
    model = small_model("llama")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(PipelineError, match="LlamaForCausalLM has 0 lists of 3 layers"):
        decoder_layers(model)
