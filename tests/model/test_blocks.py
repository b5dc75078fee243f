"""Layer by layer, with nothing quantized, equals the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_runs import plain_outputs, run_in_sequence
from families import FAMILIES, small_model, token_batches
from multimodal import MODELS, multimodal_model, samples_for_model
from torch.testing import assert_close

from steelyard.errors import PipelineError
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.precision import computing_in
from steelyard.model.source import Source
from steelyard.model.stacks import decoder_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_model_gives_the_plain_logits(family: str) -> None:
    model, batches = small_model(family), token_batches()
    expected = [out.logits for out in plain_outputs(model, batches)]
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = [out.logits for out in run_in_sequence(Source.open(model), batches)]
    assert_close(found, expected, rtol=0, atol=0)
    after = dict(model.named_parameters())
    assert_close(after, before, rtol=0, atol=0)
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(model)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_gives_the_plain_logits(family: str, tmp_path: Path) -> None:
    model, batches = small_model(family), token_batches()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    expected = [out.logits for out in plain_outputs(model, batches)]
    source = Source.open(tmp_path)
    assert not source.in_memory  # not even experts, which its class stacks
    found = [out.logits for out in run_in_sequence(source, batches)]
    last_bits = 1e-6 if family == "qwen3_moe" else 0  # experts one by one, not in one product
    assert_close(found, expected, rtol=0, atol=last_bits)
    assert not source.in_memory, "weights were kept"


@pytest.mark.parametrize("family", MODELS)
def test_images_audio_and_all_else_give_the_plain_logits(family: str, tmp_path: Path) -> None:
    made, batches = multimodal_model(family), samples_for_model(family)
    made.save_pretrained(tmp_path)
    model = type(made).from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = [out.logits for out in plain_outputs(model, batches)]
    for given in (model, tmp_path):
        found = [out.logits for out in run_in_sequence(Source.open(given), batches)]
        last_bits = 1e-6 if family == "jamba" and given is tmp_path else 0
        assert_close(found, expected, rtol=0, atol=last_bits)


@pytest.mark.parametrize(
    ("family", "forwards"),
    [
        ("llava", [0, 3]),  # a tower of 3 layers, then the decoder
        ("mllama", [0, 2, 3]),  # a tower of 2 and 1 layers, then the decoder
        ("qwen3_vl", [0, 1, 2, 3, 4, 5]),  # adds features of the tower between its layers
        ("glm5", [0, 1]),  # returns a pair, which is not known before the first layer ran
        ("jamba", [0]),
    ],
)
def test_the_models_forward_runs_no_more_often_than_it_must(
    family: str, forwards: list[int]
) -> None:
    found: list[int] = []
    samples = samples_for_model(family, count=1)
    run_in_sequence(Source.open(multimodal_model(family)), samples, found)
    assert found == forwards


def test_layers_between_which_nothing_is_computed_need_no_forward() -> None:
    """Qwen3-VL: a forward for each feature of the tower, and each layer that adds one."""
    options = MODELS["qwen3_vl"][2]
    vision = {**options["vision_config"], "depth": 6, "deepstack_visual_indexes": [1, 3]}
    text = {**options["text_config"], "num_hidden_layers": 5}
    model = multimodal_model("qwen3_vl", vision_config=vision, text_config=text)
    samples = samples_for_model("qwen3_vl", count=1)
    expected = [out.logits for out in plain_outputs(model, samples)]
    forwards: list[int] = []
    found = [out.logits for out in run_in_sequence(Source.open(model), samples, forwards)]
    assert_close(found, expected, rtol=0, atol=0)
    assert forwards == [0, 2, 4, 6, 7, 8], "6 layers of the tower, then 5 of the decoder"


def test_batches_with_and_without_images_run_together() -> None:
    model = multimodal_model("llava")
    batches = [*samples_for_model("llava"), {"input_ids": torch.arange(3, 20)[None]}]
    batches = [batches[-1], *batches]
    expected = [out.logits for out in plain_outputs(model, batches)]
    found = [out.logits for out in run_in_sequence(Source.open(model), batches)]
    assert_close(found, expected, rtol=0, atol=0)


def test_outputs_that_nothing_needs_are_not_kept() -> None:
    model = multimodal_model("llava")
    sequence = LayerSequence(model)
    (batch,) = [Batch(inputs) for inputs in samples_for_model("llava", count=1)]
    kept = []
    with sequence, torch.no_grad(), computing_in(model, torch.float32):
        for index in range(len(sequence)):
            if batch.due(index):
                sequence.advance(batch, index)
            sequence.put(index, batch, sequence.run(index, batch))
            kept.append(sorted(batch.outputs))
    # the projector reads the output of the tower's last layer but one, of all that it collects
    assert kept[-1][-1] == 4 and 3 not in kept[-1]
    assert all(len(each) <= 4 for each in kept)


def test_masks_are_not_kept_once_per_batch() -> None:
    model = small_model("gemma3")
    sequence = LayerSequence(model)
    started = [Batch({"input_ids": torch.arange(3, 23)[None]}) for _ in range(5)]
    with sequence, computing_in(model, torch.float32):
        for batch in started:
            sequence.advance(batch, 0)
    masks = {id(batch.calls[0].kwargs["attention_mask"]) for batch in started}
    assert len(masks) == 1


class Meddling(torch.nn.ModuleList):
    """Layers whose model doubles the hidden state before each of them."""

    def __iter__(self) -> Any:
        for layer in super().__iter__():
            yield lambda hidden, layer=layer, **kwargs: layer(hidden * 2, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(index)


def test_a_model_that_computes_between_layers_runs_once_more_for_each() -> None:
    model = small_model("llama")
    layers = list(model.model.layers)
    model.model.layers = Meddling(layers)
    expected = [out.logits for out in plain_outputs(model, token_batches())]
    forwards: list[int] = []
    found = run_in_sequence(Source.open(model), token_batches(), forwards)
    assert_close([out.logits for out in found], expected, rtol=0, atol=0)
    assert forwards == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_layer_that_runs_twice_is_refused() -> None:
    class Twice(torch.nn.ModuleList):
        def __iter__(self) -> Any:
            yield from (layer for layer in super().__iter__() for _ in range(2))

        def __getitem__(self, index: Any) -> Any:
            return self if isinstance(index, slice) else super().__getitem__(index)

    model = small_model("llama")
    model.model.layers = Twice(model.model.layers)
    with pytest.raises(PipelineError, match=r"calls model.layers.0 more than once.*basic"):
        run_in_sequence(Source.open(model), token_batches())


def test_a_model_without_layers_is_refused() -> None:
    model = small_model("llama")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(PipelineError, match="LlamaForCausalLM has 0 lists of 3 layers"):
        decoder_layers(model)
