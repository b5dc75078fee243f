"""Lazy reading, and every way in which a folder of safetensors can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from steelyard.checkpoint.shard_index import INDEX
from steelyard.checkpoint.shards import Shards
from steelyard.errors import CheckpointError

FIRST = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}
SECOND = {"c": torch.tensor(7, dtype=torch.int64)}


def write(folder: Path, **files: dict[str, torch.Tensor]) -> None:
    for stem, tensors in files.items():
        save_file(tensors, folder / f"{stem}.safetensors")


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write(tmp_path, one=FIRST, two=SECOND)
    write_index(tmp_path, {"c": "two.safetensors", "a": "one.safetensors", "b": "one.safetensors"})
    return tmp_path


def test_single_file(tmp_path: Path) -> None:
    write(tmp_path, model=FIRST, other=SECOND)
    with Shards(str(tmp_path)) as shards:
        assert [file.name for file in shards.files] == ["model.safetensors"]
        assert [file.name for file in shards.unread] == ["other.safetensors"]
        assert "a" in shards and "c" not in shards
        for name, value in FIRST.items():
            assert_close(shards.read(name), value, rtol=0, atol=0)


def test_sharded(sharded: Path) -> None:
    with Shards(sharded) as shards:
        assert [file.name for file in shards.files] == ["one.safetensors", "two.safetensors"]
        assert shards.folder == sharded
        assert_close(shards.read("c"), SECOND["c"])
        assert shards.total_bytes == 6 * 4 + 4 * 2 + 8
        info = shards.info("a")
        assert (info.name, info.file.name, info.dtype) == ("a", "one.safetensors", torch.bfloat16)
        assert (info.shape, info.nbytes) == ((4,), 8)


def test_without_an_index_all_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, y=SECOND, x=FIRST)
    assert [file.name for file in Shards(tmp_path).files] == ["x.safetensors", "y.safetensors"]


def test_names_follow_files_and_bytes(tmp_path: Path) -> None:
    """A file whose header lists tensors in another order than that of their bytes."""
    header = {
        "a late one": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "an early one": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    body = len(raw).to_bytes(8, "little") + raw + bytes([1, 2, 3, 4, 5])
    (tmp_path / "a.safetensors").write_bytes(body)
    write(tmp_path, b=SECOND)
    with Shards(tmp_path) as shards:
        assert shards.names() == ["an early one", "a late one", "c"]
        assert list(shards) == shards.names() and len(shards) == 3
        assert shards.read("a late one").tolist() == [4, 5]


def test_read_after_close_opens_again(sharded: Path) -> None:
    shards = Shards(sharded)
    shards.read("a")
    shards.close()
    assert_close(shards.read("a"), FIRST["a"])
    shards.close()


def test_every_type_survives(tmp_path: Path) -> None:
    types = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    types += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.float64]
    tensors = {str(t): torch.ones(2, 3).to(t) for t in [*types, torch.uint16, torch.uint32]}
    write(tmp_path, model=tensors)
    with Shards(tmp_path) as shards:
        for name, value in tensors.items():
            assert shards.info(name).dtype == value.dtype
            assert shards.info(name).nbytes == value.numel() * value.element_size()
            assert_close(shards.read(name).float(), value.float())


def test_other_files(sharded: Path) -> None:
    kept = ["config.json", "chat_template.jinja", "sub/vocab.txt", "sub/config.json"]
    weights = ["x.bin", "x.pt", "x.pth", "x.gguf", "x.h5", "x.msgpack", "sub/x.safetensors"]
    indices = ["pytorch_model.bin.index.json", "tf_model.h5.index.json"]
    left = [".git/HEAD", ".cache/huggingface/x.json"]
    for name in (*kept, *weights, *indices, *left):
        (sharded / name).parent.mkdir(parents=True, exist_ok=True)
        (sharded / name).write_text("x")
    assert sorted(str(path) for path in Shards(sharded).other_files()) == sorted(kept)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    save_file(FIRST, tmp_path / "blobs" / "1f")
    (tmp_path / "blobs" / "2e").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f")
    (snapshot / "config.json").symlink_to("../../blobs/2e")
    with Shards(snapshot) as shards:
        assert_close(shards.read("b"), FIRST["b"])
        assert shards.other_files() == [Path("config.json")]


# -- refusals ----------------------------------------------------------------------------------


def refuses(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Shards(folder)
    for word in words:
        assert word in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", "nowhere", "not a folder", "download")


def test_nothing_in_it(tmp_path: Path) -> None:
    refuses(tmp_path, str(tmp_path), "no *.safetensors")


def test_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refuses(tmp_path, "pytorch_model.bin", "from_pretrained", "safe_serialization=True")


def test_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    refuses(sharded, "two.safetensors", "not there", "incomplete")


@pytest.mark.parametrize(
    "place",
    ["/etc/x.safetensors", "../x.safetensors", "a/../../x", "C:\\x.safetensors", "a\\..\\x"],
)
def test_index_that_leaves_the_folder(sharded: Path, place: str) -> None:
    write_index(sharded, {"a": place})
    refuses(sharded, INDEX, "places a in", place, "outside the folder")


def test_index_names_a_tensor_that_is_not_there(sharded: Path) -> None:
    entries = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write_index(sharded, {**entries, "d": "two.safetensors"})
    refuses(sharded, "places d", "two.safetensors", "does not hold it")
    write_index(sharded, {**entries, "b": "two.safetensors"})
    refuses(sharded, "places b", "two.safetensors", "it is in", "one.safetensors")


def test_shard_holds_a_tensor_that_the_index_does_not_list(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "c": "two.safetensors"})
    refuses(sharded, "one.safetensors holds b", INDEX)


def test_duplicates(tmp_path: Path) -> None:
    write(tmp_path, one=FIRST, two={**SECOND, "a": torch.ones(1)})
    refuses(tmp_path, "a is both in", "one.safetensors", "two.safetensors")


def test_single_file_beside_a_foreign_index(sharded: Path) -> None:
    write(sharded, model=FIRST)
    refuses(sharded, "model.safetensors", "out of date")


@pytest.mark.parametrize("text", ["", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_index_that_is_none(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    refuses(sharded, INDEX, "not an index")


def test_truncated_file(sharded: Path) -> None:
    path = sharded / "one.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refuses(sharded, "one.safetensors", "incomplete")


def test_pointer_instead_of_a_file(sharded: Path) -> None:
    (sharded / "one.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refuses(sharded, "one.safetensors", "git lfs pull")


def test_unknown_type(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    body = len(header).to_bytes(8, "little") + header + b"0"
    (tmp_path / "model.safetensors").write_bytes(body)
    refuses(tmp_path, "x in", "type 'F3'")


def test_unknown_tensor(sharded: Path) -> None:
    with Shards(sharded) as shards, pytest.raises(CheckpointError, match="no tensor nothing"):
        shards.read("nothing")


@pytest.mark.parametrize("rows", [3, 5000])  # read, and mapped
def test_a_mapped_tensor_is_its_own(tmp_path: Path, rows: int) -> None:
    large = torch.randn(rows, 900).bfloat16()
    write(tmp_path, model={"a": torch.ones(3), "large": large})
    before = (tmp_path / "model.safetensors").read_bytes()
    with Shards(tmp_path) as shards:
        mapped = shards.mapped("large")
        assert torch.equal(mapped, large)
    mapped[0] = 0.0
    assert torch.equal(mapped[1:], large[1:])
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_changed_file_is_not_mapped(tmp_path: Path) -> None:
    write(tmp_path, model={"large": torch.randn(5000, 900).bfloat16()})
    with Shards(tmp_path) as shards:
        write(tmp_path, model={"large": torch.randn(5001, 900).bfloat16()})
        with pytest.raises(CheckpointError, match="changed while it was in use"):
            shards.mapped("large")
