"""Checks of the toy device itself, each called in a process that has it."""

from __future__ import annotations

import contextlib
import copy

import torch
from toy_device import MAIN, MEMORY, Stream, stream


@contextlib.contextmanager
def raising(kind: type[BaseException], words: str):
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {words}")


def is_an_accelerator() -> None:
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("toy")
    x = torch.arange(6.0, device="toy").reshape(2, 3)
    assert x.device == torch.device("toy", 0)
    assert (x @ x.T).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]
    made = [torch.zeros(2, device="toy"), torch.tensor([1, 2], device="toy"), x.new_ones(3)]
    made += [torch.full((2,), 3.0, device="toy"), torch.eye(2, device="toy"), torch.empty_like(x)]
    assert {each.device.type for each in made} == {"toy"}
    assert torch.empty(1, device="toy:1").device.index == 1


def parameters_move() -> None:
    layer = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    expected = layer(torch.ones(1, 4, dtype=torch.bfloat16))
    layer.to("toy")
    assert isinstance(layer.weight, torch.nn.Parameter)
    found = layer(torch.ones(1, 4, dtype=torch.bfloat16, device="toy"))
    assert torch.equal(found.cpu(), expected)
    again = copy.deepcopy(layer)
    again.weight.data.zero_()
    assert layer.weight.any()
    layer.weight.data = layer.weight.data.float()
    assert layer.weight.dtype == torch.float32 and layer.weight.device.type == "toy"
    found.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.device.type == "toy"


def devices_do_not_mix() -> None:
    x, host = torch.ones(3, device="toy"), torch.ones(3)
    for mixed in (lambda: x + host, lambda: host + x, lambda: torch.cat([x, host])):
        with raising(RuntimeError, "same device"):
            mixed()
    with raising(RuntimeError, "same device"):
        host[torch.arange(2, device="toy")]
    with raising(RuntimeError, "same device"):
        x + torch.ones(3, device="toy:1")
    with raising(TypeError, "host"):
        x.numpy()
    assert (x * torch.tensor(2.0)).tolist() == [2.0] * 3  # as on a GPU: a scalar of the host
    assert x[torch.tensor([0, 1])].shape == (2,)  # and indices


def memory_is_counted() -> None:
    memory = MEMORY[0]
    memory.reset()
    before = memory.used
    x = torch.zeros(1000, device="toy")
    view = x[10:]
    assert memory.used == before + 4000
    del x
    assert memory.used == before + 4000  # the view keeps it
    del view
    assert memory.used == before and memory.peak == before + 4000
    memory.reset(before + 6000)
    x = torch.zeros(1000, device="toy")
    with raising(torch.OutOfMemoryError, "Tried to allocate 4000"):
        x + 1
    assert memory.used == before + 4000 and memory.refused == 1
    memory.reset()


def transfers_are_logged() -> None:
    memory = MEMORY[0]
    memory.reset()
    x = torch.zeros(5).to("toy")
    pinned = torch.zeros(2, 3).pin_memory().to("toy", non_blocking=True)
    x.cpu()
    (x + 1).add_(x)
    float(x.sum())
    log = [(t.to_device, t.shape, t.nbytes, t.pinned) for t in memory.transfers]
    assert log[:3] == [
        (True, (5,), 20, False),
        (True, (2, 3), 24, True),
        (False, (5,), 20, False),
    ], log
    assert log[3:] == [(False, (), 4, False)]
    assert pinned.device.type == "toy"


def streams_need_a_wait() -> None:
    side = Stream()
    with stream(side):
        x = torch.ones(3).to("toy")
        x + 1  # in the same queue
    with raising(RuntimeError, "before the copy"):
        x + 1
    MAIN.wait_stream(side)
    with raising(RuntimeError, "record_stream"):
        x + 1
    x.record_stream(MAIN)
    x + 1
