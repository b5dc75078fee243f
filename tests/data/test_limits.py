"""Data of any size and any author: what is read of it is bounded, and what it says is escaped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_rows import make_tokenizer, rows, take, write_jsonl

from steelyard.data.data_files import LINE
from steelyard.data.tokens import CHARACTERS, RowReader
from steelyard.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.tokenizer(text, **options)


@pytest.fixture(scope="module")
def pairs() -> Any:
    """A tokenizer that merges characters, even across what looks like words."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, show_progress=False)
    text = "the cat sat on the mat and then the cat ran aaaaaaaa abababab "
    backend.train_from_iterator([text * 20], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def test_of_a_long_text_only_the_start_is_tokenized(tmp_path: Path) -> None:
    text = " ".join(f"w{i % 40}" for i in range(2_000_000))
    path = write_jsonl(tmp_path / "long.jsonl", [{"text": text}])
    counting = Counting(make_tokenizer(bos=True))
    (row,) = rows(take(path, tokenizer=lambda: counting, max_seq_length=16))
    assert row == [0, *(2 + i for i in range(15))]
    assert counting.characters < 8 * CHARACTERS * 16


@pytest.mark.parametrize("text", ["a", "ab", "the cat ", "a b", "mat and then", " " * 40 + "cat"])
@pytest.mark.parametrize("length", [1, 5, 64])
def test_tokens_are_those_of_the_whole_text(pairs: Any, text: str, length: int) -> None:
    whole = text * (20_000 // len(text))
    reader = RowReader(lambda: pairs, length)
    (found,) = reader.samples(whole, "row")
    assert found.tolist() == pairs(whole)["input_ids"][:length]


def test_line_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LINE > 20_000_000
    monkeypatch.setattr("steelyard.data.data_files.LINE", 100)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1"}, {"text": "w1 " * 100}])
    for shuffle in (True, False):
        with pytest.raises(DataError, match=r"a\.jsonl:2: the line has more than 100 bytes"):
            take(path, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
def test_value_of_many_rows_is_in_memory_once(tmp_path: Path, shuffle: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 400, pyarrow.int32()), pyarrow.array(["w1 w2 " * 200_000])
    )
    parquet.write_table(pyarrow.table({"text": text}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1_000_000
    del text
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    peak = []
    real = take(path, shuffle=shuffle, num_calibration_samples=3, max_seq_length=4)
    peak.append(pool.max_memory() - before)
    assert rows(real) == [[3, 4, 3, 4]] * 3
    assert peak[0] < 20_000_000  # 64 rows would be 77 MB, all of them 480


def test_row_group_beyond_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"text": [f"{i} " * 50_000 for i in range(10)]}), path)

    class Little:
        available = 1_000_000

    monkeypatch.setattr("psutil.virtual_memory", Little)
    with pytest.raises(DataError, match=r"row group 0 has .* bytes .*smaller row groups"):
        take(path)


def test_names_and_texts_of_strangers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"\x1b[31mred\u202e\n" + "x" * 1000: "w1"}])
    with pytest.raises(DataError) as caught:
        take(path)
    assert r"\x1b[31mred\u202e\n" in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500
    path.write_text(json.dumps({"text": "w1 \ud800 w2"}))
    with pytest.raises(DataError, match=r"cannot encode the text 'w1 .ud800 w2'"):
        take(path)
    path.write_text('{"text": ' + "9" * 5000 + "}")
    with pytest.raises(DataError, match=r"a\.jsonl:1: not JSON"):
        take(path)
