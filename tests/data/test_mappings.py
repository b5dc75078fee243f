"""Samples that are mappings of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sample_rows import rows, take, unused
from torch.testing import assert_close
from transformers import default_data_collator

from steelyard.data.mappings import Inputs, model_inputs, num_tokens
from steelyard.errors import DataError

IDS = torch.tensor([[5, 6, 7]])
PIXELS = torch.ones(1, 3, 4, 4)


def anything(_inputs: Inputs, _where: str) -> None:
    pass


def taken(dataset: Any, **options: Any) -> list[Inputs]:
    return take(dataset, tokenizer=unused, check=anything, **options).batches


@pytest.mark.parametrize("convert", [torch.as_tensor, np.asarray, lambda value: value.tolist()])
def test_tensors_arrays_and_lists_are_the_same_sample(convert: Any) -> None:
    row = {"input_ids": convert(IDS), "pixel_values": convert(PIXELS), "id": 3, "note": "a"}
    (found,) = taken([row])
    assert_close(found, {"input_ids": IDS, "pixel_values": PIXELS})


def test_token_ids_alone_are_batched_as_ever() -> None:
    data = [{"input_ids": [5, 6], "attention_mask": [1, 1], "text": "b"}, {"input_ids": [7, 8]}]
    samples = take(data, tokenizer=unused, check=anything, batch_size=2)
    assert rows(samples) == [[5, 6], [7, 8]] and len(samples.batches) == 1


def test_a_row_whose_token_ids_have_no_batch_dimension_gets_one() -> None:
    """As transformers' default collator does; its output is the oracle."""
    data = [
        {"input_ids": [5, 6], "labels": [6, 7]},
        {"input_ids": [5, 6], "pixel_values": PIXELS[0]},
        {"decoder_input_ids": [5, 6], "input_features": np.ones((4, 9), dtype=np.float32)},
    ]
    for found, row in zip(taken(data, shuffle=False), data, strict=True):
        assert_close(found, default_data_collator([row]))
    with pytest.raises(DataError, match=r"input_ids has shape \(1, 1, 2\)"):
        taken([{"input_ids": [[[5, 6]]], "labels": [[6, 7]]}])


def test_a_collator_makes_samples_of_batch_size_rows() -> None:
    data = [{"a": i} for i in range(5)]

    def collate(some: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[row["a"] + 3] for row in some])
        return {"input_ids": ids, "labels": ids}

    found = taken(data, data_collator=collate, batch_size=2)
    assert [batch["input_ids"].flatten().tolist() for batch in found] == [[3, 4], [5, 6], [7]]


def test_a_failing_collator_is_named() -> None:
    with pytest.raises(DataError, match=r"sample 0: data_collator fails \(.*division"):
        taken([{"a": 1}], data_collator=lambda rows: 1 / 0)


def test_token_ids_of_mappings_are_checked() -> None:
    with pytest.raises(DataError, match="token id 7 is outside the vocabulary of 7"):
        taken([{"input_ids": IDS, "pixel_values": PIXELS}], vocab_size=7)


def test_ragged_lists_are_refused() -> None:
    with pytest.raises(DataError, match="labels must be numbers in rows of equal length"):
        model_inputs({"input_ids": IDS, "labels": [[1, 2], [3]]}, "sample 0")


def test_only_tokens_of_the_loss_mask_are_counted() -> None:
    inputs = {"input_ids": IDS, "loss_mask": torch.tensor([[0, 1, 1]])}
    assert num_tokens(inputs) == 2
    assert num_tokens({**inputs, "attention_mask": torch.tensor([[1, 1, 0]])}) == 1


def test_tokens_are_counted_without_padding() -> None:
    mask = torch.tensor([[0, 1, 1]])
    assert num_tokens({"input_ids": IDS, "attention_mask": mask}) == 2
    assert num_tokens({"input_features": torch.ones(2, 16, 30), "labels": IDS}) == 3
    assert num_tokens({"input_features": torch.ones(2, 16, 30)}) == 60


def test_images_are_not_dropped_where_only_text_is_read() -> None:
    with pytest.raises(DataError, match="has images or audio, and only text is read here"):
        take([{"text": "a b", "image": object()}])
    with pytest.raises(DataError, match="has pixel_values, and only token ids are read here"):
        take([{"input_ids": [5, 6], "pixel_values": PIXELS}])
