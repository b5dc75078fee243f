"""Statistics over ranks: real processes agree, and on what one process would have found.

The file is its own worker. Each world size is started once, runs every case in turn and writes
down what each rank ended with; the tests then read those records. A rank that waits for ever
fails by a timeout.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from nvfp4 import nvfp4
from torch import distributed as dist
from torch.testing import assert_close
from world import start as start_world

from steelyard.errors import StatisticsError
from steelyard.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MinMaxObserver,
    Observer,
    StaticMinMaxObserver,
)
from steelyard.observers.calibration import Calibration

WIDTH = 32
ARGS = {
    "tensor": QuantizationArgs(num_bits=8, strategy="tensor"),
    "tensor_group": nvfp4(),
}
WORLDS = (2, 3, 4)
# observations on each rank: alike, uneven, and with ranks that saw nothing
COUNTS = {
    2: [(2, 2), (1, 3), (0, 2), (2, 0), (0, 0)],
    3: [(2, 2, 2), (3, 1, 2), (0, 2, 1), (2, 0, 3), (0, 0, 2), (0, 0, 0)],
    4: [(2, 1, 2, 1), (0, 3, 0, 1), (0, 0, 0, 0)],
}
NAMES = Observer.registered_names()
GATHERING = [  # what they share is the importance of the inputs, not what they observe
    n for n in NAMES if "_imatrix_sum" in Observer.get_value_from_registry(n)._act_sync_dict
]
MEMORYLESS = [n for n in NAMES if not Observer.get_value_from_registry(n)._act_sync_dict]
MERGING = [n for n in NAMES if n not in MEMORYLESS]
ACCUMULATING = [n for n in MERGING if n not in GATHERING]

HANG = datetime.timedelta(seconds=30)  # until a rank stops waiting for the others


class Averaging(MemorylessMinMaxObserver):
    """A user's observer whose statistic is declared as a mean over observations."""

    _act_sync_dict = {"mean": dist.ReduceOp.AVG}  # noqa: RUF012
    _statistics = ("min_vals", "max_vals", "mean")

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed)
        before = getattr(self, "mean", torch.zeros(1))
        self.mean = (before * self.num_updates + observed.mean().reshape(1)) / (
            self.num_updates + 1
        )


# -- what both sides do -------------------------------------------------------------------------


def batch(rank: int, index: int) -> torch.Tensor:
    """Return what a rank sees: one group above zero and one below, so 0 is in neither."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    magnitude = torch.rand(2, 3 + index, WIDTH, generator=generator) * (1 + rank + index) + 1
    return magnitude * torch.tensor([1.0, -1.0]).repeat_interleave(WIDTH // 2)


def weight() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7))


def build(name: str, strategy: str) -> Observer:
    if name == "averaging":
        return Averaging("input", ARGS[strategy])
    base_name = "weight" if name in GATHERING else "input"
    return Observer.load_from_registry(name, base_name=base_name, args=ARGS[strategy])


def gathers(observer: Observer) -> bool:
    return "_imatrix_sum" in observer._act_sync_dict


def feed(observer: Observer, values: list[torch.Tensor]) -> Observer:
    """Let an observer see values; importance is gathered from the input of a module."""
    if gathers(observer):
        if values:
            module = torch.nn.Linear(WIDTH, 1)
            observer.attach(module)
            for value in values:
                module(value)
        return observer
    for value in values:
        observer(value)
    return observer


def state(observer: Observer) -> dict[str, Any]:
    """Return everything that must agree between ranks."""
    record: dict[str, Any] = {
        "statistics": {k: v.clone() for k, v in observer.get_statistics().items()},
        "updates": observer.num_updates,
        "tokens": observer.num_observed_tokens,
        "dtype": str(observer.observed_dtype),
    }
    if gathers(observer) and record["statistics"]:
        observer(weight())
    if observer.has_statistics:
        record["qparams"] = dict(observer.get_qparams())
    return record


# -- the worker ---------------------------------------------------------------------------------


def synced(observer: Observer) -> dict[str, Any]:
    """Synchronise; return the state after it, and what the handles were."""
    before = state(observer) if not observer._act_sync_dict else None
    try:
        works = observer.sync_activation_stats()
    except (StatisticsError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"before": before, "handles": works, **state(observer)}


def run_cases(rank: int, world: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run everything in the order that all ranks share; yield a record of each case."""
    for name in (*NAMES, "averaging"):
        for strategy in ARGS:
            for counts in COUNTS[world]:
                values = [batch(rank, i) for i in range(counts[rank])]
                observer = feed(build(name, strategy), values)
                yield f"{name} {strategy} {counts}", synced(observer)

    for name in MERGING:  # one rank observes another width
        observer = build(name, "tensor_group")
        width = WIDTH * 2 if rank == world - 1 else WIDTH
        if gathers(observer):
            module = torch.nn.Linear(width, 1)
            observer.attach(module)
            module(torch.ones(1, width))
        else:
            observer(torch.ones(1, width))
        yield f"{name} other width", synced(observer)

    observers = [feed(build(name, "tensor"), [batch(rank, 0)]) for name in MERGING]
    works = [work for observer in observers for work in observer.sync_activation_stats()]
    for work in works:
        work.wait()
    for name, observer in zip(MERGING, observers, strict=True):
        yield f"{name} all at once", state(observer)

    for name in MERGING:  # the same on every rank from here on, so the average must follow
        observer = feed(build(name, "tensor"), [batch(rank, 0)])
        for work in observer.sync_activation_stats():
            work.wait()
        if not gathers(observer):
            observer(batch(9, 0))
        yield f"{name} going on", state(observer)

    module = torch.nn.Linear(WIDTH, 1)
    observer = IMatrixMSEObserver("weight", ARGS["tensor"])
    observer.attach(module)
    module(batch(rank, 0))
    observer(weight())
    for work in observer.sync_activation_stats():
        work.wait()
    yield (
        "imatrix_mse range found before",
        {
            "kept": observer.has_statistics,
            "module": {"sum": module._imatrix_sum, "count": module._imatrix_count},
            "statistics": observer.get_statistics(),
        },
    )

    for name in ACCUMULATING:
        observer = build(name, "tensor")
        with torch.inference_mode():
            observer(batch(rank, 0))
        yield f"{name} in inference mode", synced(observer)

    yield "calibration", calibrated(rank, world)


def calibrated(rank: int, world: int) -> dict[str, Any]:
    """Calibrate two experts, of which the last rank alone reaches one, and nobody a third."""
    experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
    inputs = ARGS["tensor"].model_copy(update={"observer": "static_minmax"})
    scheme = QuantizationScheme(
        targets=["Linear"], weights=ARGS["tensor"], input_activations=inputs
    )
    config = QuantizationConfig(config_groups={"group_0": scheme})
    apply_quantization_config(experts, config)
    with Calibration(experts) as calibration:
        experts[0](batch(rank, 0))
        if rank == world - 1:
            experts[1](batch(rank, 1))
        calibration.sync()
        unseen = calibration.unseen()
        calibration.finish()
    return {"unseen": unseen, "scales": [experts[i].input_scale.data for i in range(2)]}


def run_disagreeing_cases(rank: int, world: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run cases in which the ranks do not hold the same, so that none may just reduce it."""
    args, other = ARGS["tensor"], QuantizationArgs(num_bits=8, symmetric=False)
    last = rank == world - 1
    observers = {
        "options": MinMaxObserver("input", args, averaging_constant=0.5 if last else 0.1),
        "format": StaticMinMaxObserver("input", other if last else args),
        "base name": StaticMinMaxObserver("output" if last else "input", args),
        "class": (MinMaxObserver if last else StaticMinMaxObserver)("input", args),
    }
    for case, observer in observers.items():
        yield case, synced(observer(batch(rank, 0)))

    for name in ("static_minmax", "minmax"):  # the same observer, of values in fp64 and in fp32
        value = batch(rank, 0)
        observer = build(name, "tensor")(value.double() if rank == 0 else value)
        yield f"{name} mixed types", synced(observer)


RUNS = {"agreeing": run_cases, "disagreeing": run_disagreeing_cases}


def work_as_rank(rank: int, world: int, folder: Path, run: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world,
        timeout=HANG,
    )
    records = dict(RUNS[run](rank, world))
    dist.barrier()
    torch.save(records, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


# -- the tests ----------------------------------------------------------------------------------


def start(run: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """Run one world to its end; return the records of each rank."""
    codes, said = start_world(__file__, [run], world, folder)
    if codes != [0] * world:
        tails = [f"rank {r} ({codes[r]}): {text[-2000:]}" for r, text in enumerate(said)]
        pytest.fail("\n".join([f"{world} ranks did not finish", *tails]))
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(world)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start("agreeing", request.param, tmp_path_factory.mktemp(f"world{request.param}"))


def alone(name: str, strategy: str, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the state of one observer that saw the data of rank 0, then of rank 1, ..."""
    values = [batch(rank, i) for rank, count in enumerate(counts) for i in range(count)]
    return state(feed(build(name, strategy), values))


def without(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def assert_all_equal(records: list[dict[str, Any]]) -> None:
    for record in records[1:]:
        assert_same(record, records[0], rtol=0, atol=0)


def assert_same(record: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    for key in ("updates", "tokens", "dtype"):
        assert record[key] == expected[key], key
    assert_close(record["statistics"], expected["statistics"], **tolerance)
    assert ("qparams" in record) == ("qparams" in expected)
    if "qparams" in expected:
        assert_close(record["qparams"], expected["qparams"], **tolerance)


@pytest.mark.parametrize("strategy", list(ARGS))
@pytest.mark.parametrize("name", MERGING)
def test_ranks_end_as_one_observer_of_all_data(name: str, strategy: str, ranks: Any) -> None:
    for counts in COUNTS[len(ranks)]:
        records = [rank[f"{name} {strategy} {counts}"] for rank in ranks]
        assert not any("error" in record for record in records), records
        assert_all_equal([without(record, "handles", "before") for record in records])
        expected = alone(name, strategy, counts)
        assert_same(records[0], expected, rtol=0, atol=0)


def test_expert_that_one_rank_saw_is_calibrated_on_all(ranks: Any) -> None:
    world = len(ranks)
    shared = torch.stack([batch(rank, 0).abs().max() for rank in range(world)]).max()
    lonely = batch(world - 1, 1).abs().max()
    for rank in ranks:
        record = rank["calibration"]
        assert record["unseen"] == ["2"]
        expected = [(size / 127.5).reshape(1) for size in (shared, lonely)]
        assert_close(record["scales"], expected)


@pytest.mark.parametrize("name", MERGING)
def test_nothing_is_left_to_wait_for(name: str, ranks: Any) -> None:
    for strategy in ARGS:
        for counts in COUNTS[len(ranks)]:
            for rank in ranks:
                assert rank[f"{name} {strategy} {counts}"]["handles"] == []


@pytest.mark.parametrize("strategy", list(ARGS))
@pytest.mark.parametrize("name", MEMORYLESS)
def test_observer_without_memory_stays_as_it_was(name: str, strategy: str, ranks: Any) -> None:
    for counts in COUNTS[len(ranks)]:
        for number, rank in enumerate(ranks):
            record = rank[f"{name} {strategy} {counts}"]
            assert record["handles"] == []
            assert_same(record, record["before"], rtol=0, atol=0)
            values = [batch(number, i) for i in range(counts[number])]
            assert_same(record, state(feed(build(name, strategy), values)), rtol=0, atol=0)


@pytest.mark.parametrize("name", ACCUMULATING)
def test_token_counts_add_up(name: str, ranks: Any) -> None:
    for counts in COUNTS[len(ranks)]:
        tokens = sum(2 * (3 + i) for count in counts for i in range(count))
        for rank in ranks:
            record = rank[f"{name} tensor {counts}"]
            assert (record["tokens"], record["updates"]) == (tokens, sum(counts))


@pytest.mark.parametrize("name", MERGING)
def test_different_shapes_are_an_error_on_every_rank(name: str, ranks: Any) -> None:
    small, large = (WIDTH, 2 * WIDTH) if name in GATHERING else (WIDTH // 16, WIDTH // 8)
    for rank in ranks:
        error = rank[f"{name} other width"].get("error", "no error")
        assert error.startswith("StatisticsError: ")
        assert f"has shape ({small},) on one side and ({large},) on the other" in error


@pytest.mark.parametrize("name", MERGING)
def test_many_observers_may_be_under_way_at_once(name: str, ranks: Any) -> None:
    records = [rank[f"{name} all at once"] for rank in ranks]
    assert_all_equal(records)
    assert_same(records[0], alone(name, "tensor", (1,) * len(ranks)))


@pytest.mark.parametrize("name", ACCUMULATING)
def test_observing_goes_on_after_it(name: str, ranks: Any) -> None:
    values = [batch(rank, 0) for rank in range(len(ranks))]
    expected = state(feed(build(name, "tensor"), [*values, batch(9, 0)]))
    records = [rank[f"{name} going on"] for rank in ranks]
    assert_all_equal(records)
    assert_same(records[0], expected)


def test_declared_average_is_weighed_by_observations(ranks: Any) -> None:
    for strategy in ARGS:
        for counts in COUNTS[len(ranks)]:
            values = [batch(rank, i) for rank, count in enumerate(counts) for i in range(count)]
            for rank in ranks:
                record = rank[f"averaging {strategy} {counts}"]
                assert record["updates"] == len(values)
                if values:
                    mean = torch.stack([value.mean() for value in values]).mean().reshape(1)
                    assert_close(record["statistics"]["mean"], mean)


def test_importance_of_all_ranks_drops_the_range_found_without_it(ranks: Any) -> None:
    inputs = torch.cat([batch(rank, 0).reshape(-1, WIDTH) for rank in range(len(ranks))])
    for rank in ranks:
        record = rank["imatrix_mse range found before"]
        assert record["kept"] is False
        assert set(record["statistics"]) == {"_imatrix_sum", "_imatrix_count", "_imatrix_bins"}
        assert_close(record["module"]["sum"], inputs.square().sum(0))
        assert int(record["module"]["count"]) == len(inputs)
        assert_close(record["statistics"]["_imatrix_sum"], record["module"]["sum"])


@pytest.mark.parametrize("name", ACCUMULATING)
def test_statistics_gathered_in_inference_mode(name: str, ranks: Any) -> None:
    records = [rank[f"{name} in inference mode"] for rank in ranks]
    assert not any("error" in record for record in records), records
    assert_same(records[0], alone(name, "tensor", (1,) * len(ranks)))


@pytest.fixture(scope="module")
def disagreeing(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start("disagreeing", 2, tmp_path_factory.mktemp("disagreeing"))


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("options", "averaging_constant"),
        ("format", "symmetric"),
        ("base name", "output"),
        ("class", "StaticMinMaxObserver"),
    ],
)
def test_ranks_that_hold_different_observers_all_refuse(
    case: str, difference: str, disagreeing: Any
) -> None:
    for rank in disagreeing:
        error = rank[case].get("error", "no error")
        assert error.startswith("StatisticsError: ")
        assert difference in error


@pytest.mark.parametrize("name", ["static_minmax", "minmax"])
def test_ranks_that_observed_different_types_agree_or_all_refuse(
    name: str, disagreeing: Any
) -> None:
    records = [rank[f"{name} mixed types"] for rank in disagreeing]
    errors = [record.get("error") for record in records]
    assert len(set(errors)) == 1
    if errors[0] is not None:
        assert errors[0].startswith("StatisticsError: ")
        return
    for record in records:
        whole = alone(name, "tensor", (1, 1))["statistics"]
        assert_close(record["statistics"], whole, check_dtype=False)


@pytest.mark.parametrize("name", NAMES)
def test_outside_a_process_group_nothing_happens(name: str) -> None:
    assert not dist.is_initialized()
    observer = feed(build(name, "tensor"), [batch(0, 0), batch(0, 1)])
    before = {key: value.clone() for key, value in observer.get_statistics().items()}
    assert observer.sync_activation_stats() == []
    assert_close(observer.get_statistics(), before, rtol=0, atol=0)


if __name__ == "__main__":
    work_as_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
