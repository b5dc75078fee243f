"""Rows with images and audio, through processors of transformers."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from processors import llava, picture, whisper
from sample_rows import take, unused
from torch.testing import assert_close

from steelyard.data.mappings import Inputs
from steelyard.errors import DataError


def taken(dataset: Any, processor: Any, **options: Any) -> list[Inputs]:
    return take(dataset, tokenizer=unused, processor=lambda: processor, **options).batches


def expected(text: str) -> Inputs:
    return dict(llava()(text=[text], images=[picture()], return_tensors="pt"))


def test_a_collator_of_a_known_dataset_gets_the_output_of_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"image": picture(), "caption": ["w7", "w8"]}
    loaded = datasets.Dataset.from_list([row])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: loaded)
    (plain,) = taken("flickr30k", llava())
    options = {"data_collator": transformers.default_data_collator, "check": lambda *_: None}
    (found,) = taken("flickr30k", llava(), **options)
    assert_close(found, plain)


CONTENT = [{"type": "image"}, {"type": "text", "text": "w7 w8"}]
ROWS: dict[str, Any] = {
    "a column": {"text": "<image> w7 w8 ", "image": picture()},
    "a column of lists": {"text": "<image> w7 w8 ", "images": [picture()]},
    "messages and a column": {
        "messages": [{"role": "user", "content": CONTENT}],
        "images": [picture()],
    },
    "messages": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": picture()}, CONTENT[1]]}
        ]
    },
}


@pytest.mark.parametrize("kind", ROWS)
def test_images_in_columns_and_messages_are_processed(kind: str) -> None:
    (found,) = taken([ROWS[kind]], llava())
    assert_close(found, expected("<image> w7 w8 "), rtol=0, atol=0)


def test_an_image_column_of_datasets() -> None:
    made = datasets.Dataset.from_list([{"text": "<image> w7 w8 ", "image": picture()}] * 2)
    found = taken(made.cast_column("image", datasets.Image()), llava())
    assert len(found) == 2
    assert_close(found[1], expected("<image> w7 w8 "), rtol=0, atol=0)


def test_an_image_as_parquet_files_store_it(tmp_path: Any) -> None:
    made = datasets.Dataset.from_list([{"text": "<image> w7 w8 ", "image": picture()}])
    made.cast_column("image", datasets.Image()).to_parquet(tmp_path / "data.parquet")
    (found,) = taken(tmp_path / "data.parquet", llava())
    assert_close(found, expected("<image> w7 w8 "), rtol=0, atol=0)


def test_speech_and_its_text() -> None:
    sound = np.random.default_rng(0).normal(size=16000).astype(np.float32)
    row = {"audio": {"array": sound, "sampling_rate": 16000}, "text": "w3 w4"}
    (found,) = taken([row], whisper())
    assert found["labels"].tolist() == [[3, 4]]
    assert found["input_features"].shape == (1, 16, 32)
    assert torch.isfinite(found["input_features"]).all()


def test_a_wrong_sampling_rate_is_an_error() -> None:
    row = {"audio": {"array": np.zeros(800), "sampling_rate": 8000}, "text": "w3"}
    with pytest.raises(DataError, match=r"WhisperProcessor cannot process .*audio.*16000"):
        taken([row], whisper())


def test_an_image_that_the_text_has_no_place_for_is_an_error() -> None:
    with pytest.raises(DataError, match="sample 0"):
        taken([{"text": "w7 w8", "image": "nowhere.png"}], llava())


def test_what_is_made_is_checked_against_the_model() -> None:
    def check(inputs: Inputs, where: str) -> None:
        raise DataError(f"{where}: {sorted(inputs)}")

    with pytest.raises(DataError, match=r"sample 0: \['attention_mask', 'input_ids', 'pixel_va"):
        taken([ROWS["a column"]], llava(), check=check)
