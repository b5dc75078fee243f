"""Ranks with an accelerator each: that of LOCAL_RANK; together they write the CPU's bytes.

The file is its own worker.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from families import assert_same_tensors
from toy_runs import model_folder, run
from world import start

from steelyard.distributed import local_index
from steelyard.errors import RanksError

CASES = ("static", "gptq")


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_RANK", str(torch.accelerator.device_count()))
    with pytest.raises(RanksError, match="as many ranks as there are"):
        local_index()


def test_two_ranks_write_the_bytes_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computes on its own device, and brings each weight there once."""
    monkeypatch.setenv("STEELYARD_BACKEND", "reference")
    model = model_folder(tmp_path / "model")
    for case in CASES:
        run(model, case, tmp_path / f"cpu-{case}", device="cpu")
    codes, logs = start(__file__, [], 2, tmp_path)
    assert codes == [0, 0], "\n".join(logs)
    for case in CASES:
        assert_same_tensors(tmp_path / f"cpu-{case}", tmp_path / f"toy-{case}")


def work(rank: int, world: int, folder: Path) -> None:
    import toy_device
    from torch import distributed as dist

    toy_device.install()
    memory = toy_device.MEMORY
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    for case in CASES:
        for each in memory:
            each.reset()
        found = run(folder / "model", case, folder / f"toy-{case}")
        assert memory[rank].transfers and not memory[1 - rank].transfers
        assert memory[rank].peak <= found.plan.device_memory
        brought = Counter(t.shape for t in memory[rank].transfers if t.to_device)
        assert 2 <= brought[32, 64] <= 4  # down_proj of two layers; rounded by the other rank
        assert brought[128, 32] == 1  # the embedding
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
