"""Ranks with an accelerator each: that of LOCAL_RANK; together they write the CPU's bytes.

Tensors go from device to device through a backend of the toy device, which stands for NCCL. The
file is its own worker.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from families import assert_same_tensors
from toy_runs import RECIPES, model_folder, rows, run
from world import start

from steelyard.distributed import Ranks, join_from_environment, local_index
from steelyard.errors import RanksError

CASES = ("static", "gptq", "smooth", "experts")
KINDS = {"device": CASES, "same-device": CASES[:1], "gloo": CASES[:2]}
"""How tensors reach the other rank: one has the device of the other, or torch no backend for it."""


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_RANK", str(torch.accelerator.device_count()))
    with pytest.raises(RanksError, match="as many ranks as there are"):
        local_index()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models, and their checkpoints of one process on the CPU."""
    folder = tmp_path_factory.mktemp("expected")
    model_folder(folder / "model")
    model_folder(folder / "experts", "qwen3_moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEELYARD_BACKEND", "reference")
        for case in CASES:
            run(*_given(folder, case), folder / f"cpu-{case}", device="cpu")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_write_the_bytes_of_the_cpu(
    expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each computes on its own device, and brings each weight there once."""
    monkeypatch.setenv("STEELYARD_BACKEND", "reference")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    codes, logs = start(__file__, [kind, port, str(expected)], 2, tmp_path)
    assert codes == [0, 0], "\n".join(logs)
    for case in KINDS[kind]:
        assert_same_tensors(expected / f"cpu-{case}", tmp_path / case)
    if kind == "device":
        assert_same_tensors(tmp_path / "enough", tmp_path / "less")


def _given(folder: Path, case: str) -> tuple[Path, str]:
    return (folder / "experts", "gptq") if case == "experts" else (folder / "model", case)


def work(rank: int, world: int, folder: Path, kind: str, port: str, expected: Path) -> None:
    import toy_carrier
    import toy_device

    toy_device.install()
    if kind != "gloo":
        toy_carrier.register()
    memory, index = toy_device.MEMORY, 0 if kind == "same-device" else rank
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    join_from_environment()
    for case in KINDS[kind]:
        toy_carrier.CARRIED.clear()
        for each in memory:
            each.reset()
        model, recipe = _given(expected, case)
        found = run(model, recipe, folder / case)
        direct = kind == "device"
        assert bool(toy_carrier.CARRIED) == direct
        way = "from device to device (toycarrier)" if direct else "through host memory (gloo)"
        assert f"tensors go between ranks {way}" in found.plan.placing
        assert memory[index].transfers and not memory[1 - index].transfers
        assert memory[index].peak <= found.plan.device_memory
        if case in ("static", "gptq"):
            brought = Counter(t.shape for t in memory[index].transfers if t.to_device)
            assert brought[128, 32] == 1  # the embedding
            most = 2 if direct else 4  # if rounded by the other rank, and sent through the host
            assert 2 <= brought[32, 64] <= most  # down_proj of two layers
    _check_messages(rank, kind == "device")
    if kind == "device":
        _run_with_less_memory(rank, expected / "model", folder)
    torch.distributed.destroy_process_group()


def _run_with_less_memory(rank: int, model: Path, folder: Path) -> None:
    """Run twice; in the second run, the device of one rank cannot hold a batch."""
    from toy_device import MEMORY

    from steelyard import oneshot

    memory, options = MEMORY[rank], {"batch_size": 8, "activations": "host"}
    for name in ("enough", "less"):
        short = name == "less" and rank == 1
        # less, and averages would count the parts of a batch, which the device cannot join
        memory.reset(int(0.8 * memory.peak) if short else 1 << 40)
        found = oneshot(model, RECIPES["static"], rows(96, 16), folder / name, **options)
        assert bool(memory.refused) == short
    words = "rank 1, model.layers.0: the device ran out of memory with 8 samples of 96 tokens"
    assert any(note.startswith(words) for note in found.notes), found.notes


def _check_messages(rank: int, direct: bool) -> None:
    """Every way of sending: types that backends lack, no elements, one element, strides."""
    ranks = Ranks.current()
    device = torch.device("toy", local_index())
    own = {
        "bf16": torch.full((2, 3), rank + 0.5, dtype=torch.bfloat16).to(device).T,
        "fp8": torch.full((3,), rank + 1.0).to(torch.float8_e4m3fn).to(device),
        "scalar": torch.tensor(rank).to(device),
        "none": torch.empty(0, 4).to(device),
        "host": torch.tensor([rank]),
        "text": str(rank),
    }

    def check(found: dict[str, object], sender: int) -> None:
        for name, value in found.items():
            if name == "text":
                assert value == str(sender)
                continue
            assert isinstance(value, torch.Tensor)
            there = direct or sender == rank
            on_device = name not in ("host", "none") and there
            assert sender == rank or value.device == (device if on_device else torch.device("cpu"))
            wanted = own[name].cpu().double() + (0 if name == "none" else sender - rank)
            torch.testing.assert_close(value.cpu().double(), wanted)

    for sender, found in enumerate(ranks.gather(own)):
        check(found, sender)
    check(ranks.broadcast(own, 1), 1)
    for target in range(2):
        collected = list(ranks.collect(own, target))
        assert len(collected) == (2 if rank == target else 0)
        for sender, found in enumerate(collected):
            check(found, sender)


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:6], Path(sys.argv[6]))
