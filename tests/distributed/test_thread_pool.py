"""Threads of a pool: who does what, with how many of torch's threads, and what failures leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest
import torch

from steelyard.distributed import ThreadPool

VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")


@pytest.fixture(autouse=True)
def six_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


def seen() -> tuple[int, int, bool, str]:
    """A thread, its share of torch's, whether it has gradients, and what the caller has set."""
    grad = torch.is_grad_enabled()
    return threading.get_ident(), torch.get_num_threads(), grad, VARIABLE.get()


@pytest.mark.parametrize(("count", "share"), [(2, 3), (3, 2), (6, 1)])
def test_each_number_has_a_thread_of_its_own(count: int, share: int) -> None:
    VARIABLE.set("set")
    with ThreadPool(count) as pool:
        first = pool.do((i, seen) for i in range(2 * count))
        assert torch.get_num_threads() == 6
        again = pool.do((i, seen) for i in range(count))
    assert again == first[:count] == first[count:]
    assert len({ident for ident, *_ in first} | {threading.get_ident()}) == count + 1
    assert {tuple(rest) for _, *rest in first} == {(share, False, "set")}
    left = {thread.ident for thread in threading.enumerate()}
    assert not left & {ident for ident, *_ in first}  # they have ended


def test_one_is_who_calls() -> None:
    with ThreadPool() as pool:
        assert pool.do([(0, seen), (5, seen)]) == [seen(), seen()]


def test_as_many_as_torch_has_but_not_more_than_16() -> None:
    assert ThreadPool.on(torch.device("cpu")).count == 6
    assert ThreadPool.on(torch.device("cuda")).count == 1
    torch.set_num_threads(20)
    assert ThreadPool.on(torch.device("cpu")).count == 16


def test_they_work_beside_each_other_and_answer_in_order() -> None:
    met = threading.Barrier(3, timeout=20)

    def meet(number: int) -> int:
        met.wait()
        return number

    with ThreadPool(3) as pool:
        calls = [(i, lambda i=i: meet(i)) for i in range(6)]
        assert pool.do(calls) == list(range(6))


def test_a_failure_is_raised_when_nothing_runs_any_more() -> None:
    """What has begun comes to its end, what has not is left."""
    begun, done = threading.Event(), threading.Event()
    left: list[int] = []

    def fail() -> None:
        assert begun.wait(20)
        raise ValueError("this one")

    def slow() -> None:
        begun.set()
        threading.Event().wait(0.2)
        done.set()

    with ThreadPool(2) as pool:
        calls = [(1, fail), (0, slow), (0, lambda: left.append(0)), (0, lambda: left.append(1))]
        with pytest.raises(ValueError, match="this one"):
            pool.do(calls)
        assert done.is_set()
        assert len(left) < 2
        assert torch.get_num_threads() == 6
        assert pool.do([(0, lambda: "goes on"), (1, lambda: "too")]) == ["goes on", "too"]


def test_what_was_begun_can_be_closed() -> None:
    with ThreadPool(2) as pool:
        answers = pool.begin((i, lambda i=i: i) for i in range(100))
        assert next(answers) == 0
        assert torch.get_num_threads() == 3
        answers.close()
        assert torch.get_num_threads() == 6
        assert pool.do([(1, lambda: "goes on")]) == ["goes on"]
