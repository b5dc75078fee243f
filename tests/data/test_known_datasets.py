"""Datasets by the short names of llm-compressor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_rows import take

from steelyard.data.hub_datasets import Loading
from steelyard.data.known_datasets import KNOWN, known_dataset
from steelyard.errors import DataError

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "c4": ({"text": "w1 w2", "url": "x"}, "w1 w2"),
    "wikitext": ({"text": "w1 w2"}, "w1 w2"),
    "cnn_dailymail": ({"article": "w1", "highlights": "w2"}, "w1\n\nIn short:\nw2"),
    "evolcodealpaca": ({"instruction": "w1", "output": "w2"}, "w1\n\nw2"),
    "gsm8k": ({"question": "w1", "answer": "w2"}, "w1\n\nw2"),
    "open_platypus": ({"instruction": "w1", "input": "", "output": "w2"}, "w1\n\nw2"),
    "perfectblend": (
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
        "user: w1\n\nassistant: w2",
    ),
    "ultrachat_200k": (
        {"messages": [{"role": "user", "content": "w1"}], "prompt": "w1"},
        "user: w1",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_text(name: str) -> None:
    row, text = ROWS[name]
    assert KNOWN[name].row(row, lambda: False)["text"] == text
    made = KNOWN[name].row(row, lambda: True)
    if KNOWN[name].chat is None:
        assert made["text"] == text
    else:
        assert made["messages"][0] == {"role": "user", "content": "w1"}


def test_rows_with_images_and_audio() -> None:
    picture = KNOWN["flickr30k"].row({"image": "P", "caption": ["a", "b"]}, lambda: True)
    question, answer = picture["messages"]
    assert picture["images"] == ["P"] and question["content"][0] == {"type": "image"}
    assert answer["content"] == [{"type": "text", "text": "a b"}]
    spoken = KNOWN["peoples_speech"].row({"audio": "A", "text": "t", "id": 1}, lambda: True)
    assert spoken == {"audio": "A", "text": "t"}


def test_every_name_is_tried() -> None:
    assert KNOWN.keys() - ROWS.keys() == {"flickr30k", "peoples_speech"}
    assert known_dataset("flickr") is KNOWN["flickr30k"]
    assert known_dataset("ultrachat") is KNOWN["ultrachat_200k"]
    assert known_dataset("org/name") is None


@pytest.mark.parametrize("name", ["gsm8k", "c4", "ultrachat_200k"])
def test_hub_name_split_and_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(*names: str, **options: Any) -> Any:
        asked.append((names, options["split"], options["streaming"]))
        return [ROWS[name][0]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    take(name, shuffle=True)
    take(name, shuffle=True, loading=Loading("train[:8]", "other"))
    place, large = KNOWN[name].hub, name == "c4"
    own = [KNOWN[name].config] if KNOWN[name].config else []
    train = "train_sft" if name == "ultrachat_200k" else "train"
    assert asked == [
        ((place, *own), train, large),
        ((place, "other"), f"{train}[:8]", False),
    ]


def test_local_copy_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").mkdir()
    row, text = ROWS["gsm8k"]
    Path("gsm8k/train.jsonl").write_text(json.dumps(row) + "\n")
    expected = take([text]).batches[0]["input_ids"].tolist()
    made = take("gsm8k")
    assert made.batches[0]["input_ids"].tolist() == expected
    assert "from gsm8k (train)" in made.description
    own = take("gsm8k", preprocess=lambda row: {"text": row["answer"]})
    assert own.batches[0]["input_ids"].tolist() == take(["w2"]).batches[0]["input_ids"].tolist()


def test_without_a_network_the_error_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*names: str, **options: Any) -> Any:
        raise ConnectionError("cannot reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"'open_platypus'.*cannot reach.*\.jsonl.*'demo'"):
        take("open_platypus")
