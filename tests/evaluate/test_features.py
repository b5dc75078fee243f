"""Models with images and audio, layer by layer, equal transformers with both models in memory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_equal, in_fp32, numbers, samples, weights
from families import small_model
from multimodal import IMAGE, VIDEO, multimodal_model, samples_for_model
from processors import llava, picture
from torch.utils.data import DataLoader

from steelyard import oneshot
from steelyard.errors import DataError, PipelineError
from steelyard.evaluate import divergence as compare
from steelyard.evaluate import evaluate
from steelyard.evaluate.evaluation_memory import LogitSizes
from steelyard.model import activations
from steelyard.model.layerwise import LayerwiseModel
from steelyard.modifiers import QuantizationModifier

Sample = dict[str, torch.Tensor]
FAMILIES = ["llava", "qwen2_vl", "qwen3_vl", "qwen3_5", "mllama", "idefics3"]
GROUPS = {"group_0": weights(num_bits=4, strategy="group", group_size=16)}


def made(
    family: str, folder: Path, scheme: dict[str, Any] | None = None, **changes: Any
) -> tuple[Any, Path, Path]:
    """Return the class of a model, its folder, and that of the quantized one, its tower too."""
    model = multimodal_model(family, **changes)
    model.save_pretrained(folder / "m")
    modifier = QuantizationModifier(
        ignore=["lm_head"], **({"config_groups": GROUPS} if scheme is None else scheme)
    )
    data = samples_for_model(family, seed=7) if scheme is not None else None
    oneshot(folder / "m", modifier, data, folder / "q", show_progress=False)
    return type(model), folder / "m", folder / "q"


@pytest.fixture(scope="module")
def small_llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    return made("llava", tmp_path_factory.mktemp("llava"))


@torch.no_grad()
def oracle(kind: Any, base: Path, quantized: Path, data: list[Sample]) -> dict[str, float]:
    """Return the numbers from transformers, for samples without padding, of one row each."""
    models = [in_fp32(folder, kind) for folder in (base, quantized)]
    compared = []
    for sample in data:
        ids = sample["input_ids"][0].tolist()
        text = [i for i in range(1, len(ids)) if ids[i] not in (IMAGE, VIDEO)]
        logits = [model(**sample).logits[0, [i - 1 for i in text]] for model in models]
        compared.append((logits, [ids[i] for i in text]))
    return numbers(compared)


def padded(rows: list[Sample]) -> Sample:
    """Return samples as one batch, the first ones padded on the left."""
    length = max(row["input_ids"].shape[1] for row in rows)
    return {
        name: torch.cat(
            [
                row[name]
                if name == "pixel_values"
                else torch.nn.functional.pad(row[name], (length - row[name].shape[1], 0))
                for row in rows
            ]
        )
        for name in rows[0]
    }


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_audio"])
def test_families_equal_transformers(family: str, tmp_path: Path) -> None:
    kind, base, quantized = made(family, tmp_path)
    data = samples_for_model(family)
    found = evaluate(base, quantized, data)
    assert found.kl_divergence > 0
    assert_equal(found, oracle(kind, base, quantized, data))


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "gemma3"])  # Gemma 3's head is tied
def test_quantized_inputs_equal_transformers(family: str, tmp_path: Path) -> None:
    kind, base, quantized = made(family, tmp_path, {"scheme": "FP8"})
    data = samples_for_model(family)
    assert_equal(evaluate(base, quantized, data), oracle(kind, base, quantized, data))


def test_a_model_equals_itself(small_llava: Any) -> None:
    found = evaluate(small_llava[1], small_llava[1], samples_for_model("llava"))
    assert (found.kl_divergence, found.kl_max, found.top1_agreement) == (0, 0, 1)


def test_padding_is_not_scored(small_llava: Any) -> None:
    data = samples_for_model("llava", 4)
    found = evaluate(*small_llava[1:], DataLoader(data, batch_size=2, collate_fn=padded))
    assert found.samples == 4
    assert_equal(found, oracle(*small_llava, data))


def test_text_may_be_mixed_in(small_llava: Any) -> None:
    """Token ids are batched as before, and the tower does not run for them."""
    texts = [[token % 100 for token in ids] for ids in samples()[:3]]  # no placeholders
    data = samples_for_model("llava")
    found = evaluate(*small_llava[1:], [texts[0], data[0], *texts[1:], *data[1:]], batch_size=2)
    as_mappings = [{"input_ids": torch.tensor([ids])} for ids in texts]
    assert_equal(found, oracle(*small_llava, [*as_mappings, *data]))


def test_cutting_up_the_work_changes_nothing(
    small_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = samples_for_model("llava")
    sizes = partial(LogitSizes, 3 * 128, 2 * 128)  # three positions: some hold no text
    monkeypatch.setattr(compare, "LogitSizes", sizes)
    assert_equal(evaluate(*small_llava[1:], data), oracle(*small_llava, data))


def test_pixels_and_labels_in_other_types(small_llava: Any) -> None:
    """Nested lists, as `datasets` gives them; labels are no input."""
    data = [{**s, "labels": s["input_ids"]} for s in samples_for_model("llava")]
    lists = [{name: tensor.tolist() for name, tensor in sample.items()} for sample in data]
    expected = {**evaluate(*small_llava[1:], samples_for_model("llava")).as_dict(), "seconds": 0}
    for each in (data, lists):
        assert {**evaluate(*small_llava[1:], each).as_dict(), "seconds": 0} == expected


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_hidden_states_beyond_the_limit_go_to_files(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of decoder layers are reused; those of the tower are kept beside them."""
    text = {**multimodal_model("llava").config.text_config.to_dict(), "num_hidden_layers": 5}
    _, base, quantized = made("llava", tmp_path, text_config=text)
    (tmp_path / "spilled").mkdir()
    monkeypatch.setattr(activations.tempfile, "tempdir", str(tmp_path / "spilled"))
    sizes: list[int] = []
    run = LayerwiseModel.run

    def watched(self: LayerwiseModel, *args: Any) -> Any:
        ends = run(self, *args)
        files = [f for f in (tmp_path / "spilled").rglob("*") if f.is_file()]
        sizes.append(sum(f.stat().st_size for f in files))
        return ends

    monkeypatch.setattr(LayerwiseModel, "run", watched)
    data = samples_for_model("llava")
    decoder = 64 * 4 * sum(sample["input_ids"].numel() for sample in data)
    both = decoder + 64 * 4 * 5 * 3 * len(data)  # five patches of three layers of the tower
    # too little for the decoders; for the towers, which is seen after the first; enough for all
    memory = (2 * decoder - 1, 2 * decoder, 2 * both)[limit]
    found = evaluate(base, quantized, data, memory=memory)
    assert sizes == [[both, 2 * both], [decoder, decoder + both], [0, 0]][limit]
    assert list((tmp_path / "spilled").iterdir()) == []
    whole = evaluate(base, quantized, data)
    assert {**found.as_dict(), "seconds": 0} == {**whole.as_dict(), "seconds": 0}


def test_one_layer_is_in_memory_at_a_time(
    small_llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[set[str]] = []
    check = LayerwiseModel._check

    def watched(self: LayerwiseModel, values: torch.Tensor, what: str, verb: str = "is") -> None:
        parameters = self.source.model.named_parameters()
        real = [name for name, p in parameters if p.device.type != "meta"]
        held.append(
            {
                n.partition(".layers.")[0] + n.split(".layers.")[1][0]
                for n in real
                if ".layers." in n
            }
        )
        check(self, values, what, verb)

    monkeypatch.setattr(LayerwiseModel, "_check", watched)
    evaluate(*small_llava[1:], samples_for_model("llava"))
    assert max(map(len, held)) == 1
    seen = set().union(*held)
    assert {"model.language_model0", "model.language_model1"} < seen
    assert sum("vision" in name for name in seen) >= 2


@pytest.mark.parametrize("given", ["processor", "files"])
def test_images_go_through_the_processor(given: str, small_llava: Any, tmp_path: Path) -> None:
    kind, base, quantized = small_llava
    text = "w5 <image> w7 w8 w9"
    content = [{"type": "image"}, {"type": "text", "text": "w11 w12"}]
    rows = [
        {"text": text, "image": picture()},
        {"messages": [{"role": "user", "content": content}], "images": [picture()]},
    ]
    options: dict[str, Any] = {"processor": llava()}
    if given == "files":
        base = Path(shutil.copytree(base, tmp_path / "with processor"))
        llava().save_pretrained(base)
        options = {}
    found = evaluate(base, quantized, rows, **options)
    made = [
        dict(llava()(text=[each], images=[picture()], return_tensors="pt"))
        for each in (text, "<image> w11 w12 ")
    ]
    assert_equal(found, oracle(kind, base, quantized, made))


def test_other_columns_of_text_are_ignored_as_before(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    model = small_model("llama")
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    model.save_pretrained(tmp_path / "q")
    found = evaluate(tmp_path / "m", tmp_path / "q", samples(), batch_size=2)
    rows = [
        {
            "input_ids": torch.tensor([[0, 0, *ids]]),
            "attention_mask": torch.tensor([[0, 0, *[1] * len(ids)]]),
            "labels": torch.tensor([3]),
            "special_tokens_mask": [0] * (len(ids) + 2),
            "score": [0.5, 0.25],
        }
        for ids in samples()
    ]
    other = evaluate(tmp_path / "m", tmp_path / "q", rows, batch_size=2)
    assert {**found.as_dict(), "seconds": 0} == {**other.as_dict(), "seconds": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("input_ids"), "sample 0 has .*pixel_values but no input_ids"),
        (lambda s: s.update(pixel_vales=s["pixel_values"]), "did you mean 'pixel_values'"),
        (
            lambda s: s.update(attention_mask=torch.ones(1, 3)),
            r"attention_mask is \(1, 3\), and input_ids is \(1, 10\)",
        ),
        (lambda s: s["input_ids"].fill_(IMAGE), "none has a second token of text"),
    ],
)
def test_samples_that_cannot_be_scored(change: Any, message: str, small_llava: Any) -> None:
    data = samples_for_model("llava", 1)
    change(data[0])
    with pytest.raises(DataError, match=message):
        evaluate(*small_llava[1:], data)


def test_pixels_for_a_text_model_are_an_error(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    with pytest.raises(DataError, match="LlamaForCausalLM does not accept pixel_values"):
        evaluate(tmp_path / "m", tmp_path / "m", samples_for_model("llava"))


@pytest.mark.parametrize("family", ["whisper", "t5"])
def test_encoder_decoders_are_refused(family: str, tmp_path: Path) -> None:
    multimodal_model(family).save_pretrained(tmp_path / "m")
    with pytest.raises(PipelineError, match="is an encoder-decoder model"):
        evaluate(tmp_path / "m", tmp_path / "m", samples_for_model(family))
