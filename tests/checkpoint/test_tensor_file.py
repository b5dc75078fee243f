"""Files of tensors: a full disk is told as one, and damaged files are refused in a sentence."""

from __future__ import annotations

import errno
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from steelyard.checkpoint.tensor_file import save_tensors
from steelyard.errors import ImportanceError
from steelyard.observers.importance_file import load_importance, save_importance


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_disk_that_is_full(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with files_of_at_most(4096), pytest.raises(OSError) as caught:
        save_tensors({"a": torch.zeros(10_000)}, path)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(path)
    with files_of_at_most(4096), pytest.raises(OSError):
        save_importance({"a": (torch.ones(10_000), 3)}, path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.sum": torch.ones(4)},
        {"a.sum": torch.ones(4), "a.count": torch.ones(2)},
        {"a.sum": torch.ones(4, 4), "a.count": torch.tensor(3)},
        {"a.sum": torch.ones(()), "a.count": torch.tensor(3)},
        {"a.sum": torch.ones(4, dtype=torch.bool), "a.count": torch.tensor(3)},
        {"a.sum": torch.ones(4), "a.count": torch.tensor(float("nan"))},
        {"a.sum": torch.ones(4), "a.count": torch.tensor(float("inf"))},
        {"a.sum": torch.full((4,), float("nan")), "a.count": torch.tensor(3)},
        {"a.sum": torch.ones(4), "a.count": torch.tensor(0)},
    ],
)
def test_importance_of_other_shapes(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "importance.safetensors"
    save_file(tensors, path, metadata={"steelyard": "importance 1"})
    with pytest.raises(ImportanceError) as caught:
        load_importance(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["importance.safetensors", "importance.gguf"])
def test_damaged_importance(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("gguf"):
        gguf = pytest.importorskip("gguf")
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("blk.0.attn_q.weight.in_sum2", torch.ones(1, 8).numpy())
        writer.add_tensor("blk.0.attn_q.weight.counts", torch.full((1, 1), 3.0).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        save_importance({"model.layers.0.self_attn.q_proj": (torch.ones(8), 3)}, path)
    whole = path.read_bytes()
    modules = ["model.layers.0.self_attn.q_proj"]
    assert load_importance(path, modules)[modules[0]][1] == 3
    draw = random.Random(0)
    for _ in range(10 if name.endswith("gguf") else 200):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 1, 3])):
            damaged[draw.randrange(min(len(whole), 400))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            load_importance(path, modules)
        except ImportanceError as error:
            assert len(str(error)) < 1000, error
