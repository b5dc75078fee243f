"""Samples from every kind of data: the same tokens, whatever they come in."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_rows import CHAT, TEXTS, ids_of, make_tokenizer, rows, take, unused, write_jsonl
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from steelyard.data.data_files import BLOCK
from steelyard.data.limits import learned_positions
from steelyard.errors import DataError

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

IDS = [ids_of(text) for text in TEXTS]
PADDED = torch.tensor([[0, *ids] for ids in IDS])
MASK = torch.tensor([[0, 1, 1, 1]] * len(IDS))


class Streamed(IterableDataset):  # type: ignore[type-arg]
    """A stream that knows its length, as some do."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __iter__(self) -> Any:
        return iter(TEXTS)


@pytest.mark.parametrize(
    "dataset",
    [
        TEXTS,
        tuple(TEXTS),
        [{"text": text} for text in TEXTS],
        {"text": TEXTS},
        (text for text in TEXTS),
        Streamed(),
        DataLoader(TEXTS, batch_size=3),  # type: ignore[arg-type]
        DataLoader([{"text": text} for text in TEXTS], batch_size=3),  # type: ignore[arg-type]
    ],
    ids=["list", "tuple", "rows", "columns", "generator", "stream", "loader", "row_loader"],
)
def test_texts(dataset: Any) -> None:
    assert rows(take(dataset)) == IDS


@pytest.mark.parametrize(
    "dataset",
    [
        IDS,
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        np.array(IDS),
        [torch.tensor(ids) for ids in IDS],
        [np.array(ids) for ids in IDS],
        [{"input_ids": ids} for ids in IDS],
        [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 3)} for ids in IDS],
        {"input_ids": PADDED, "attention_mask": MASK},
        {"input_ids": PADDED.tolist(), "attention_mask": MASK.bool().tolist()},
        DataLoader(TensorDataset(torch.tensor(IDS)), batch_size=4),
        DataLoader(IDS, batch_size=4, collate_fn=list),  # type: ignore[arg-type]
        DataLoader(
            [{"input_ids": i, "attention_mask": m} for i, m in zip(PADDED, MASK, strict=True)],  # type: ignore[arg-type]
            batch_size=4,
        ),
    ],
)
def test_token_ids_need_no_tokenizer(dataset: Any) -> None:
    assert rows(take(dataset, tokenizer=unused)) == IDS


def test_one_mapping_of_ids_is_one_sample() -> None:
    assert rows(take({"input_ids": [3, 4, 5]}, tokenizer=unused)) == [[3, 4, 5]]


def test_the_tokenizer_is_made_once() -> None:
    made = []
    take(TEXTS, tokenizer=lambda: made.append(1) or make_tokenizer())
    assert made == [1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_jsonl(tmp_path: Path, shuffle: bool) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": text, "n": 1} for text in TEXTS])
    assert sorted(rows(take(path, shuffle=shuffle))) == sorted(IDS)
    samples = take(str(path), shuffle=shuffle)
    assert sorted(rows(samples)) == sorted(IDS)
    assert "empty" not in samples.description  # nothing follows the last line end
    path.write_text(path.read_text().removesuffix("\n"))
    assert sorted(rows(take(path, shuffle=shuffle))) == sorted(IDS)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    def tokenizer() -> Any:
        made = make_tokenizer(bos=True)
        made.chat_template = CHAT
        return made

    chats = [[{"role": f"w{i}", "content": text}] for i, text in enumerate(TEXTS)]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat} for chat in chats])
    expected = [ids_of(f"w{i} {text}") for i, text in enumerate(TEXTS)]
    for dataset in (path, chats):
        assert rows(take(dataset, tokenizer=tokenizer)) == expected
    with pytest.raises(DataError, match=r"chat.jsonl:1: .*chat template"):
        take(path)


@pytest.mark.parametrize("shuffle", [False, True])
def test_parquet(tmp_path: Path, shuffle: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    table = pyarrow.table({"text": TEXTS, "other": list(range(len(TEXTS)))})
    parquet.write_table(table, path, row_group_size=3)
    taken = rows(take(path, shuffle=shuffle, num_calibration_samples=7))
    in_order = rows(take(TEXTS, shuffle=shuffle, num_calibration_samples=7))
    assert taken == in_order
    with pytest.raises(DataError, match=r"data\.parquet: .*nothing.*got: text, other"):
        take(path, text_column="nothing")
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"data\.parquet is not a parquet file"):
        take(path)


@pytest.mark.parametrize("shuffle", [False, True])
def test_damaged_parquet(tmp_path: Path, shuffle: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36  # the header of the first page
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.parquet cannot be read: .*write it again"):
        take(path, shuffle=shuffle)
    words = pyarrow.array([b"a b", b"\xff\xfe\xfd"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": words}), path)
    with pytest.raises(DataError, match=r"data\.parquet cannot be read: .*utf-8.*write it again"):
        take(path, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
def test_datasets_by_object(shuffle: bool) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": TEXTS})
    expected = rows(take(TEXTS, shuffle=shuffle))
    splits = datasets.DatasetDict({"train": whole, "test": whole.select([1])})
    assert rows(take(whole, shuffle=shuffle)) == expected
    assert rows(take(whole.to_iterable_dataset(), shuffle=shuffle)) == IDS
    assert rows(take(splits, split="train", shuffle=shuffle)) == expected
    assert rows(take(datasets.DatasetDict({"a": whole}), shuffle=shuffle)) == expected
    assert rows(take(splits, shuffle=shuffle)) == expected  # train, as in llm-compressor
    assert rows(take(splits, split="train[1:3]")) == IDS[1:3]
    others = datasets.DatasetDict({"a": whole, "b": whole})
    with pytest.raises(DataError, match="the splits a, b: choose one"):
        take(others)
    with pytest.raises(DataError, match="no split 'dev', only: train, test"):
        take(splits, split="dev")
    loaded = take(whole, split="train", shuffle=shuffle)
    assert rows(loaded) == expected
    assert "splits='train' is not applied" in loaded.description


@pytest.mark.parametrize("shuffle", [False, True])
def test_datasets_by_name(tmp_path: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write_jsonl(folder / "train.jsonl", [{"text": text} for text in TEXTS])
    expected = rows(take(TEXTS, shuffle=shuffle))
    assert rows(take("org/name", shuffle=shuffle)) == expected
    write_jsonl(folder / "test.jsonl", [{"text": "w1"}])
    assert rows(take("org/name", shuffle=shuffle, split="test")) == [[3]]
    assert rows(take("org/name", shuffle=shuffle)) == expected  # train, as in llm-compressor
    with pytest.raises(DataError, match="'org/name' cannot be loaded"):
        take("org/name", shuffle=shuffle, split="dev")


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_frames(shuffle: bool) -> None:
    pandas = pytest.importorskip("pandas")
    index = [f"row {i}" for i in range(len(TEXTS))]
    frame = pandas.DataFrame({"text": TEXTS, "n": range(len(TEXTS))}, index=index)
    expected = rows(take(TEXTS, shuffle=shuffle))
    assert rows(take(frame, shuffle=shuffle)) == expected
    assert rows(take(frame["text"], shuffle=shuffle)) == expected
    ids = pandas.DataFrame({"input_ids": IDS})
    assert rows(take(ids, shuffle=shuffle, tokenizer=unused)) == expected
    with pytest.raises(DataError, match=r"the DataFrame, sample 0: expected one of .*got: n"):
        take(frame[["n"]])


# -- text files -------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [False, True])
def test_text_is_joined_and_cut_into_pieces(tmp_path: Path, bos: bool) -> None:
    path = tmp_path / "data.txt"
    path.write_text("\n\n".join(TEXTS))
    found = rows(take(path, max_seq_length=8, tokenizer=lambda: make_tokenizer(bos)))
    start = [0] if bos else []
    assert all(row[: len(start)] == start for row in found)
    assert [token for row in found for token in row[len(start) :]] == ids_of(" ".join(TEXTS))
    assert {len(row) for row in found[:-1]} == {8}


def test_only_the_start_of_a_text_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    with path.open("w") as file:
        file.write("w1 w2 w3\n\n" * BLOCK)
        file.seek(2**36)  # a hole: 64 GiB that take no space
        file.write("\n")
    found = rows(take(path, max_seq_length=16, num_calibration_samples=100))
    assert len(found) == 100
    assert found[0][:6] == [3, 4, 5, 3, 4, 5]


@pytest.mark.parametrize("gap", [" ", "\n", "\n\n"])
def test_blocks_of_text_lose_nothing(tmp_path: Path, gap: str) -> None:
    path = tmp_path / "data.txt"
    words = [f"w{i % 40}" for i in range(BLOCK)]
    path.write_text(gap.join(words))
    found = rows(take(path, max_seq_length=1000, num_calibration_samples=1000))
    assert [token for row in found for token in row] == ids_of(" ".join(words))


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"w1\n" * (BLOCK // 2) + b"\xff\xfe")
    with pytest.raises(DataError, match=r"data\.txt: not UTF-8 text somewhere after line \d+"):
        take(path)


# -- which samples are taken ------------------------------------------------------------------


def test_shuffling_depends_on_the_seed_only() -> None:
    dataset = torch.arange(200).reshape(100, 2)
    options: dict[str, Any] = {"tokenizer": unused, "shuffle": True}
    first = rows(take(dataset, num_calibration_samples=20, **options))
    assert first == rows(take(dataset.tolist(), num_calibration_samples=20, **options))
    assert first != dataset[:20].tolist()
    assert first != rows(take(dataset, num_calibration_samples=20, seed=1, **options))
    assert first == rows(take(dataset, num_calibration_samples=50, **options))[:20]
    assert sorted(rows(take(dataset, **options))) == dataset.tolist()


def test_only_the_chosen_rows_are_read() -> None:
    read: list[int] = []

    class Counting(list[list[int]]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    take(Counting([[1, 2]] * 1000), tokenizer=unused, shuffle=True, num_calibration_samples=5)
    assert len(set(read)) <= 6  # and a look at the first, to see what they are


def test_empty_samples_are_skipped_replaced_and_counted() -> None:
    samples = take(["", "w1", None, " \n", "w2", "w3"], shuffle=True, num_calibration_samples=3)
    assert sorted(rows(samples)) == [[3], [4], [5]]
    assert "empty" in samples.description


def test_fewer_samples_than_asked_for_are_told() -> None:
    assert "512 were requested" in take(TEXTS).description
    assert "were requested" not in take(TEXTS, num_calibration_samples=10).description


@pytest.mark.parametrize("dataset", [[], ["", " "], torch.empty(0, 4, dtype=torch.int64), {}])
def test_no_samples_are_an_error(dataset: Any) -> None:
    with pytest.raises(DataError):
        take(dataset)


def test_empty_files_are_an_error(tmp_path: Path) -> None:
    for name in ("data.txt", "data.jsonl"):
        path = tmp_path / name
        path.write_text("\n\n")
        for shuffle in (False, True):
            with pytest.raises(DataError, match=f"{name} holds no calibration data"):
                take(path, shuffle=shuffle)


def test_texts_are_cut_to_the_positions_of_the_model(tmp_path: Path) -> None:
    samples = take(TEXTS, max_positions=2)
    assert rows(samples) == [ids[:2] for ids in IDS]
    assert "truncated to the model's 2 positions, not 2048" in samples.description
    assert "positions" not in take(TEXTS, max_positions=3, max_seq_length=3).description
    path = tmp_path / "data.txt"
    path.write_text(" ".join(TEXTS))
    found = rows(take(path, max_positions=7, tokenizer=lambda: make_tokenizer(bos=True)))
    assert {len(row) for row in found[:-1]} == {7}
    assert [token for row in found for token in row[1:]] == ids_of(" ".join(TEXTS))


@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        ([[3, 4], [3, 4, 5]], "the list, sample 1"),
        ({"input_ids": PADDED, "attention_mask": MASK}, "sample 0"),
        (DataLoader(TensorDataset(torch.tensor(IDS)), batch_size=4), "the DataLoader, batch 0"),
    ],
    ids=["list", "mapping", "loader"],
)
def test_token_ids_beyond_the_positions_of_the_model_are_refused(dataset: Any, where: str) -> None:
    with pytest.raises(DataError, match=rf"{where}: 3 tokens .* 2 positions .*max_seq_length=2 "):
        take(dataset, tokenizer=unused, max_positions=2)
    assert all(len(row) <= 2 for row in rows(take(dataset, max_positions=2, max_seq_length=2)))
    assert take(dataset, tokenizer=unused, max_positions=3).num_samples


@pytest.mark.parametrize(
    ("family", "options", "positions"),
    [
        ("opt", {"max_position_embeddings": 64}, 64),
        ("gpt2", {"n_positions": 96}, 96),
        ("llama", {}, None),
        ("llama", {"max_position_embeddings": 128}, None),  # as many as there are tokens
        ("gemma3", {}, None),
    ],
)
def test_learned_positions(family: str, options: dict[str, Any], positions: int | None) -> None:
    assert learned_positions(small_model(family, **options)) == positions


def test_long_samples_are_cut() -> None:
    assert rows(take(TEXTS, max_seq_length=2)) == [ids[:2] for ids in IDS]
    assert rows(take(IDS, max_seq_length=2)) == [ids[:2] for ids in IDS]


# -- batches ----------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    batch_size=st.integers(1, 4),
    batch_tokens=st.none() | st.integers(1, 12),
)
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_batches_hold_every_sample_once_in_order(
    lengths: list[int], batch_size: int, batch_tokens: int | None
) -> None:
    dataset = [[i] * length for i, length in enumerate(lengths)]
    samples = take(dataset, tokenizer=unused, batch_size=batch_size, batch_tokens=batch_tokens)
    assert sorted(rows(samples)) == sorted(dataset)
    batches = [batch["input_ids"] for batch in samples.batches]
    firsts = [int(batch[0, 0]) for batch in batches]
    assert firsts == sorted(firsts)
    for length in set(lengths):
        same = [batch for batch in batches if batch.shape[1] == length]
        size = batch_size if batch_tokens is None else max(1, batch_tokens // length)
        assert_close(torch.cat(same)[:, 0], torch.cat(same)[:, 0].sort().values)
        assert [len(batch) for batch in same[:-1]] == [size] * (len(same) - 1)
        assert len(same[-1]) <= size


# -- padding ----------------------------------------------------------------------------------


@given(
    samples=st.lists(st.lists(st.integers(0, 40), max_size=6), min_size=1, max_size=6),
    side=st.sampled_from(["left", "right", "both"]),
    kind=st.sampled_from([torch.int64, torch.bool, torch.float32]),
)
@settings(max_examples=80, derandomize=True, deadline=None, database=None)
def test_padding_is_cut_off_on_any_side(
    samples: list[list[int]], side: str, kind: torch.dtype
) -> None:
    width = max(map(len, samples)) + 2
    ids, mask = (
        torch.zeros(len(samples), width, dtype=torch.int64),
        torch.zeros(len(samples), width),
    )
    for i, sample in enumerate(samples):
        start = {"left": width - len(sample), "right": 0, "both": 1}[side]
        ids[i, start : start + len(sample)] = torch.tensor(sample, dtype=torch.int64)
        mask[i, start : start + len(sample)] = 1
    batch = {"input_ids": ids, "attention_mask": mask.to(kind)}
    kept = [sample for sample in samples if sample]
    for dataset in (batch, [batch]):
        if kept:
            assert rows(take(dataset, tokenizer=unused)) == kept
        else:
            with pytest.raises(DataError, match=f"{len(samples)} samples are empty"):
                take(dataset, tokenizer=unused)


@pytest.mark.parametrize(
    ("ids", "mask", "told"),
    [
        ([1, 2, 3], [1, 0, 1], "a gap"),
        ([1, 2, 3], [1, 1], "shape"),
        ([1, 2, 3], [1, 2, 3], "other than 0 and 1"),
        ([1, 2, 3], [1.0, 0.5, 0.0], "other than 0 and 1"),
        ([[1, 2], [3, 4]], [[1, 1]], "2 rows of input_ids, 1 of attention_mask"),
    ],
)
def test_masks_that_are_no_padding_are_refused(ids: Any, mask: Any, told: str) -> None:
    with pytest.raises(DataError, match=f"sample 0: .*{told}"):
        take([{"input_ids": ids, "attention_mask": mask}], tokenizer=unused)


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"prompt": "w1"}, r"one of the columns input_ids, text, messages, got: prompt"),
        ({"text": 3}, "'text', got a int"),
        ([1, 2], "expected an object .* got a list"),
        ("w1", "expected an object .* got a str"),
        ({"input_ids": [1, "a"]}, "must be numbers"),
        ({"input_ids": [1.5]}, "must be integers"),
        ({"input_ids": [True]}, "must be integers"),
        ({"input_ids": [-100, 3]}, "token id -100 is negative"),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_bad_lines_are_named(tmp_path: Path, line: Any, told: str, shuffle: bool) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "w1"}, {"text": "w2"}, line])
    with pytest.raises(DataError, match=rf"data\.jsonl:3: .*{told}"):
        take(path, shuffle=shuffle)


@pytest.mark.parametrize("line", [b"{", b"\xff", b"[" * 100_000])
def test_lines_that_are_no_json_are_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "w1"}\r\n' + line + b"\n")
    with pytest.raises(DataError, match=r"data\.jsonl:2: not (JSON|UTF-8)"):
        take(path)


def test_a_named_column_is_read_and_nothing_else() -> None:
    dataset = [{"body": "w1", "text": "w2", "input_ids": [9]}]
    assert rows(take(dataset, text_column="body")) == [[3]]
    with pytest.raises(DataError, match="sample 0: expected one of the columns title"):
        take(dataset, text_column="title")


def test_token_ids_outside_the_vocabulary_are_named() -> None:
    assert rows(take([[1, 2], [41]], tokenizer=unused, vocab_size=42)) == [[1, 2], [41]]
    with pytest.raises(DataError, match="sample 1: token id 42 is outside the vocabulary of 42"):
        take([[1, 2], [3, 42]], tokenizer=unused, vocab_size=42)


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (None, "a NoneType is not calibration data"),
        (7, "a int is not calibration data"),
        ([1, 2, 3], "one sample: put it into a list"),
        (torch.arange(3), r"must be \(samples, seq\)"),
        (torch.zeros(2, 2), "must be integers"),
        ([object()], "sample 0 is a object"),
        ("some text to calibrate with", "there is no file"),
        ("missing.jsonl", "there is no file 'missing.jsonl'"),
        (Path("org/name"), "there is no file"),
        ("w1 " * 2000, "there is no file"),
        ({"text": ["a"], "n": [1, 2]}, "columns of equal length"),
        (
            DataLoader(TensorDataset(torch.tensor(IDS), torch.ones(10, 3))),
            "batch 0: a list of 2 tensors",
        ),
        (DataLoader(IDS, batch_size=2), "default collate_fn"),  # type: ignore[arg-type]
        (
            DataLoader([{"input_ids": ids} for ids in IDS], batch_size=2),  # type: ignore[arg-type]
            "default collate_fn",
        ),
    ],
)
def test_what_is_no_data(dataset: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        take(dataset)


def test_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / "data.parquet"
    path.touch()
    with pytest.raises(DataError, match=r"pip install steelyard\[data\]"):
        take(path)
    with pytest.raises(
        DataError, match=r"'org/name' needs datasets: pip install steelyard\[data\]"
    ):
        take("org/name")


def test_unknown_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.xml"
    path.write_text("<text>w1</text>")
    with pytest.raises(DataError, match=re.escape("cannot read files of type .xml")):
        take(path)
    with pytest.raises(DataError, match="is a file"):
        take(write_jsonl(tmp_path / "data.jsonl", [{"text": "w1"}]), split="train")


@pytest.mark.parametrize(
    "option", ["num_calibration_samples", "max_seq_length", "batch_size", "batch_tokens"]
)
def test_counts_start_at_one(option: str) -> None:
    with pytest.raises(DataError, match=f"{option} must be at least 1, got 0"):
        take(TEXTS, **{option: 0})


@pytest.mark.parametrize(
    "option", ["num_calibration_samples", "max_seq_length", "batch_size", "batch_tokens", "seed"]
)
@pytest.mark.parametrize("value", [None, "4", 4.0, True])
def test_counts_are_whole_numbers(option: str, value: Any) -> None:
    if (option, value) == ("batch_tokens", None):
        return  # which is its default
    with pytest.raises(DataError, match=re.escape(f"{option} must be an integer, got {value!r}")):
        take(TEXTS, shuffle=True, **{option: value})


def test_counts_of_numpy_are_taken() -> None:
    options = {"num_calibration_samples": np.int64(4), "seed": np.int32(1), "shuffle": True}
    assert take(TEXTS, **options).num_samples == 4


def test_seeds_that_torch_does_not_take() -> None:
    with pytest.raises(DataError, match="seed must be a 64-bit integer"):
        take(TEXTS, seed=2**64)


def test_the_argument_is_called_as_oneshot_calls_it() -> None:
    with pytest.raises(DataError, match="splits='train' needs"):
        take(TEXTS, split="train")
