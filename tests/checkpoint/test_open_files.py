"""Threads that read one shard share one descriptor."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from steelyard.checkpoint import Shards, open_files

TENSORS = {"a": torch.arange(64.0), "b": torch.arange(64.0, 128.0)}


def descriptors_of(path: Path) -> int:
    """Return how many descriptors of this process lead to a file."""
    wanted, found = path.stat(), 0
    for number in range(256):
        try:
            found += os.path.samestat(os.fstat(number), wanted)
        except OSError:
            continue
    return found


def test_two_threads_open_a_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    real = open_files.open_file
    opened: list[Path] = []

    def slow(path: Path) -> int:
        opened.append(path)
        time.sleep(0.1)  # long enough for the other thread to ask too
        return real(path)

    monkeypatch.setattr(open_files, "open_file", slow)
    start = threading.Barrier(2)
    read: dict[str, torch.Tensor] = {}

    with Shards(tmp_path) as shards:

        def work(name: str) -> None:
            start.wait()
            read[name] = shards.read(name)

        threads = [threading.Thread(target=work, args=(name,)) for name in TENSORS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert opened == [file]
        assert descriptors_of(file) == 1
    assert descriptors_of(file) == 0
    for name, value in TENSORS.items():
        assert_close(read[name], value, rtol=0, atol=0)


def test_closed_files_are_opened_again(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    shards = Shards(tmp_path)
    shards.read("a")
    shards.close()
    assert_close(shards.read("b"), TENSORS["b"], rtol=0, atol=0)
    shards.close()
    assert descriptors_of(tmp_path / "model.safetensors") == 0
