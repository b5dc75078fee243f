"""A checkpoint is complete or not there, whatever happens on the way."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close

from steelyard.checkpoint import CheckpointWriter, Shards, quantization_config_dict
from steelyard.checkpoint.shard_index import INDEX
from steelyard.errors import CheckpointError

CONFIG = {"model_type": "llama"}


def some_tensors(count: int = 5) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(count)}


def write(folder: Path, tensors: dict[str, torch.Tensor], **options: object) -> Path:
    with CheckpointWriter(folder, **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish(CONFIG)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with Shards(folder) as shards:
        return {name: shards.read(name).clone() for name in shards}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_file(tmp_path: Path) -> None:
    out = write(tmp_path / "out", some_tensors())
    assert names_in(tmp_path) == ["out"]
    assert names_in(out) == ["config.json", "model.safetensors", "provenance.json"]
    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert_close(read_all(out), some_tensors(), rtol=0, atol=0)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_hold_no_more_than_asked(tmp_path: Path) -> None:
    large = {"large": torch.zeros(1000), **some_tensors()}
    out = write(tmp_path / "out", large, max_shard_bytes=1000)
    files = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert names_in(out) == ["config.json", *files, INDEX, "provenance.json"]
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"] == {"total_size": 4000 + 5 * 400}
    assert [index["weight_map"][name] for name in large] == [files[i] for i in (0, 1, 1, 2, 2, 3)]
    assert_close(read_all(out), large, rtol=0, atol=0)


def test_tensors_are_not_held(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        for i in range(3):
            tensor = torch.full((100,), float(i))
            held = weakref.ref(tensor)
            writer.add(f"tensor {i}", tensor)
            del tensor
            assert held() is None
        writer.finish(CONFIG)
    assert read_all(tmp_path / "out")["tensor 2"].tolist() == [2.0] * 100


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"all": base, "same": base, "part": base[1:3], "turned": base.t(), "none": base[:0]}
    out = write(tmp_path / "out", {**tensors, "parameter": torch.nn.Parameter(base)})
    assert_close(read_all(out), {**tensors, "parameter": base}, rtol=0, atol=0)


def test_carry_copies_all_but_weights_and_config(tmp_path: Path) -> None:
    source = write(tmp_path / "source", some_tensors())
    (source / "sub").mkdir()
    (source / "sub" / "config.json").write_text("inner")
    (source / "tokenizer.json").write_text("tokens")
    (source / "recipe.yaml").write_text("old")
    with Shards(source) as shards, CheckpointWriter(tmp_path / "out", source=shards) as writer:
        writer.add("x", torch.ones(1))
        writer.write_text("recipe.yaml", "new")
        carried = writer.carry(shards)
        writer.write_text("notes/run.txt", "text")
        out = writer.finish({"a": 1})
    assert sorted(map(str, carried)) == ["sub/config.json", "tokenizer.json"]
    texts = {p: (out / p).read_text() for p in ("recipe.yaml", "sub/config.json", "notes/run.txt")}
    assert list(texts.values()) == ["new", "inner", "text"]
    assert json.loads((out / "config.json").read_text()) == {"a": 1}
    assert read_all(out).keys() == {"x"}


# -- what must not be overwritten ---------------------------------------------------------------


def test_existing_output_needs_overwrite(tmp_path: Path) -> None:
    out = write(tmp_path / "out", some_tensors())
    with pytest.raises(CheckpointError, match=r"out is not empty.*overwrite=True"):
        CheckpointWriter(out)
    write(out, {"new": torch.ones(1)}, overwrite=True)
    assert read_all(out).keys() == {"new"}
    assert names_in(tmp_path) == ["out"]


def test_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", some_tensors())
    write(tmp_path / "a" / "b" / "out", some_tensors())
    assert names_in(tmp_path / "a" / "b") == ["out"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("source", "source itself"),
        (".", "contains the source"),
        ("source/out", "inside the source"),
    ],
)
def test_source_is_safe(tmp_path: Path, output: str, message: str) -> None:
    source = write(tmp_path / "source", some_tensors())
    for given in (source, Shards(source)):
        with pytest.raises(CheckpointError, match=message):
            CheckpointWriter(tmp_path / output, overwrite=True, source=given)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match="source itself"):
        CheckpointWriter(tmp_path / "link", overwrite=True, source=source)


def test_output_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file"):
        CheckpointWriter(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file is not a folder that you may write to"):
        CheckpointWriter(tmp_path / "file" / "out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
        with pytest.raises(CheckpointError, match="may write to"):
            CheckpointWriter(tmp_path / "out")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(CheckpointError, match="mount point"):
        CheckpointWriter(tmp_path / "disk")


# -- failures -----------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_failure_leaves_no_trace(tmp_path: Path, kind: type[BaseException]) -> None:
    out = write(tmp_path / "out", some_tensors())
    with pytest.raises(kind), CheckpointWriter(out, overwrite=True, max_shard_bytes=10) as writer:
        for name, tensor in some_tensors().items():
            writer.add(name, tensor + 1)
        assert len(names_in(tmp_path)) == 2  # something is on the disk by now
        raise kind
    assert names_in(tmp_path) == ["out"]
    assert_close(read_all(out), some_tensors(), rtol=0, atol=0)
    with pytest.raises(Stop), CheckpointWriter(tmp_path / "a" / "b"):
        raise Stop
    assert names_in(tmp_path) == ["out"]


def test_old_output_is_restored_if_the_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = write(tmp_path / "out", some_tensors())
    monkeypatch.setattr(
        "steelyard.checkpoint.work_folder.exchange", lambda *_: False
    )  # as on some disks
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "checkpoint":
            raise OSError("no such luck")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="complete, but could not be moved") as caught:
        write(out, {"new": torch.ones(1)}, overwrite=True)
    assert_close(read_all(out), some_tensors(), rtol=0, atol=0)
    kept = tmp_path / ".out.steelyard" / "checkpoint"
    assert names_in(tmp_path) == [".out.steelyard", "out"] and str(kept) in str(caught.value)
    assert read_all(kept).keys() == {"new"}  # hours of work, not thrown away


def test_output_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(CheckpointError, match=r"overwrite=True.*kept at"),
        CheckpointWriter(out) as writer,
    ):
        writer.add("x", torch.ones(1))
        out.mkdir()
        (out / "theirs").write_text("x")
        writer.finish(CONFIG)
    assert names_in(out) == ["theirs"]


def test_everything_is_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[int | str] = []  # inodes, which a file keeps when it is renamed
    fsync, rename = os.fsync, Path.rename

    def record_sync(handle: int) -> None:
        events.append(os.fstat(handle).st_ino)
        fsync(handle)

    def record_rename(self: Path, target: Path) -> Path:
        if Path(target).name == "out":
            events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    write(tmp_path / "out", some_tensors(), max_shard_bytes=1000)
    before = events[: events.index("rename")]
    out = tmp_path / "out"
    assert {path.stat().st_ino for path in (out, *out.iterdir())} < {*before}
    assert events[events.index("rename") + 1 :] == [tmp_path.stat().st_ino]


def test_misuse(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="x was added to the checkpoint twice"):
        write_twice(out)
    with pytest.raises(CheckpointError, match="no tensor was added"):
        write(out, {})
    with pytest.raises(RuntimeError, match="call finish"), CheckpointWriter(out) as writer:
        writer.add("x", torch.ones(1))
    with pytest.raises(RuntimeError, match="inside `with"):
        CheckpointWriter(out).add("x", torch.ones(1))
    for name in ("../x", "/x", "config.json", INDEX):
        with pytest.raises(CheckpointError, match="cannot be written"), CheckpointWriter(out) as w:
            w.write_text(name, "")
    assert names_in(tmp_path) == []


def write_twice(out: Path) -> None:
    with CheckpointWriter(out) as writer:
        writer.add("x", torch.ones(1))
        writer.add("x", torch.ones(1))


# -- config -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESET_SCHEMES)
def test_config_is_that_of_the_model_compressor(tmp_path: Path, name: str) -> None:
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(name, ["Linear"])},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="compressed",
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
    )
    ModelCompressor(quantization_config=config).update_config(str(tmp_path))
    theirs = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    ours = quantization_config_dict(config)
    assert ours == theirs
    assert quantization_config_dict(QuantizationConfig.model_validate(ours)) == ours


@pytest.mark.parametrize("count", [3, 1200])
def test_tensors_of_odd_sizes_lie_where_every_reader_finds_them(count: int, tmp_path: Path) -> None:
    """Also with more names than a header has room for: then there is a second shard."""
    generator = torch.Generator().manual_seed(count)
    tensors: dict[str, torch.Tensor] = {}
    for i in range(count):
        tensors[f"model.layers.{i}.self_attn.q_proj.input_zero_point"] = torch.tensor(
            [i % 100], dtype=torch.int8
        )
        tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = torch.randn(
            3, 7, generator=generator
        ).to(torch.bfloat16)
        tensors[f"model.layers.{i}.self_attn.q_proj.weight_shape"] = torch.tensor([i, i])
    tensors["empty"] = torch.empty(0, 4)
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish({})
    loaded: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        loaded.update(load_file(file))  # the library's own reader
    assert_close(loaded, tensors, rtol=0, atol=0)
