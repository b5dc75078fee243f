"""Whole runs over ranks: any number of them writes the bytes that one process writes.

The file is its own worker. Each world runs all cases in turn, so that libraries are imported once.
"""

from __future__ import annotations

import datetime
import filecmp
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from expert_families import saved
from families import small_model, token_batches
from multimodal import multimodal_model, samples_for_model
from torch import distributed as dist
from world import start

from steelyard.algorithms import Algorithm, Block, ModuleResult, Nearest
from steelyard.checkpoint import CheckpointWriter
from steelyard.checkpoint.provenance import read_provenance
from steelyard.distributed import Ranks, liveness
from steelyard.engine import stream_jobs
from steelyard.entry import oneshot
from steelyard.errors import DataError, RanksError
from steelyard.modifiers import Modifier, QuantizationModifier

WORLDS = (2, 3, 4)
HANG = 25  # seconds until a rank stops waiting for the others


def group(observer: str, **weights: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "strategy": "group", "group_size": 16, "observer": observer}
    return {"targets": ["Linear"], "weights": {**base, **weights}}


def inputs(observer: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "strategy": "tensor", "observer": observer, "dynamic": False, **more}


CHANNEL = {"num_bits": 8, "strategy": "channel", "observer": "memoryless_mse"}
STATIC = {
    "QuantizationModifier": {
        "ignore": ["lm_head"],
        "config_groups": {
            "attention": {
                "targets": ["re:.*[qkv]_proj$"],
                "weights": CHANNEL,
                "input_activations": inputs("minmax"),
            },
            "o": {
                "targets": ["re:.*o_proj$"],
                "weights": CHANNEL,
                "input_activations": inputs("static_minmax", symmetric=False),
            },
            "mlp": {
                "targets": ["re:.*(gate|up|down)_proj$"],
                "weights": CHANNEL,
                "input_activations": inputs("mse"),
            },
        },
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
            "observer": "minmax",
        },
    }
}
GPTQ = {"GPTQModifier": {"ignore": ["lm_head"], "config_groups": {"all": group("optimal")}}}
TUNED = {
    "AutoRoundModifier": {
        "ignore": ["lm_head"],
        "config_groups": {"all": group("memoryless_mse")},
        "iters": 3,
        "batch_size": 6,
    }
}
ORDERED = {
    "GPTQModifier": {
        "ignore": ["lm_head"],
        "actorder": "weight",
        "config_groups": {"all": group("memoryless_mse", symmetric=False)},
    }
}
LAST = {
    "QuantizationModifier": {
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": CHANNEL,
                "input_activations": inputs("memoryless_minmax"),
            }
        },
    }
}
FUSED = {"GPTQModifier": {"ignore": ["lm_head"], "targets": ["Linear"], "scheme": "NVFP4"}}
WEIGHED = {
    "IMatrixGatherer": {"ignore": ["lm_head"]},
    "QuantizationModifier": {
        "ignore": ["lm_head"],
        "config_groups": {"all": group("imatrix_mse")},
    },
}
PLAIN = {
    "QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"all": group("optimal")}}
}

FINISHED = {
    "IMatrixGatherer": {"ignore": ["lm_head"]},
    "QuantizationModifier": {
        "ignore": ["lm_head"],
        "config_groups": {"all": group("imatrix_mse", num_bits=3)},
    },
    "TuningModifier": {"epochs": 2, "lr": 1e-3},
}
BUDGET = {"BitBudgetModifier": {"bits": 5.5, "bit_widths": [4, 6, 8]}, **GPTQ}
UNTIED = {"GPTQModifier": {"config_groups": {"all": group("optimal")}}}
UNTIED_PLAIN = {"QuantizationModifier": {"config_groups": {"all": group("optimal")}}}


@Modifier.register("NudgeModifier")
class NudgeModifier(QuantizationModifier):
    algorithm: ClassVar[str] = "nudging"


@Algorithm.register("nudging")
class Nudging(Nearest):
    """Halves the norm before each q_proj, on the rank that solves it alone."""

    streams = False

    def solve(self, block: Block, state: Any) -> dict[str, ModuleResult]:
        for name in block.mine:
            if name.endswith("q_proj"):
                norm = f"{block.name}.input_layernorm.weight"
                block.change(norm, block.tensor(norm) / 2)
        return super().solve(block, state)


NUDGED = {"NudgeModifier": {"ignore": ["lm_head"], "config_groups": {"all": group("optimal")}}}

SEEN = {"QuantizationModifier": {"ignore": ["lm_head"], "targets": ["Linear"], "scheme": "FP8"}}


SOME = ["re:.*layers.0.*(q|up|down)_proj$"]
AWQ = {"AWQModifier": {"n_grid": 3, "targets": SOME}, **PLAIN}
AUTO = {"TransformModifier": {"n_grid": 2, "batches": 3, "targets": SOME}, **SEEN}


def pictures() -> list[dict[str, torch.Tensor]]:
    """Return samples of which the first ranks get some without an image."""
    text = [{"input_ids": batch} for batch in token_batches()[:1]]
    return [*text, *samples_for_model("llava", 2), *text, *samples_for_model("llava", 1, seed=1)]


def rows() -> list[torch.Tensor]:
    """Return enough samples to hold out some of them."""
    chance = torch.Generator().manual_seed(0)
    return list(torch.randint(3, 128, (4, 6, 24), generator=chance))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a plain tensor changed by one rank": (NUDGED, {"dataset": None}),
    "static": (STATIC, {}),
    "static, error propagated": (STATIC, {"propagate_error": True}),
    "static, model as a whole": (STATIC, {"pipeline": "basic"}),
    "static, without memory": (LAST, {}),
    "gptq": (GPTQ, {}),
    "gptq, in order of activations": (ORDERED, {}),
    "gptq, fused": (FUSED, {}),
    "awq, one sample": (AWQ, {"model": "experts", "dataset": token_batches()[:1]}),
    "a measured choice of transforms": (AUTO, {}),
    "gptq, one sample": (GPTQ, {"dataset": token_batches()[:1]}),
    "gptq, in bf16": (GPTQ, {"model": "bf16"}),
    "gptq, few rows": (GPTQ, {"model": "wide"}),  # of down_proj: the drift is summed times it
    "gptq, in passes": (GPTQ, {"pipeline": "basic"}),
    "autoround": (TUNED, {}),
    "autoround, no error propagated": (TUNED, {"propagate_error": False}),
    "importance": (WEIGHED, {}),
    "importance, error propagated": (WEIGHED, {"propagate_error": True}),
    "importance, one sample": (WEIGHED, {"dataset": token_batches()[:1]}),
    "tuned by the first rank": (FINISHED, {"dataset": rows()}),
    "a bit budget": (BUDGET, {"dataset": rows()}),
    "gptq, no error propagated": (GPTQ, {"propagate_error": False}),
    "stream": (PLAIN, {"dataset": None}),
    "weights of a loaded model": (PLAIN, {"dataset": None, "loaded": True}),
    "static, loaded": (STATIC, {"loaded": True}),
    "images, not in every sample": (SEEN, {"model": "llava", "dataset": pictures()}),
    "images, gptq": (GPTQ, {"model": "llava", "dataset": pictures()}),
    "a tied head, gptq": (UNTIED, {"model": "tied"}),
    "a tied head, stream": (UNTIED_PLAIN, {"model": "tied", "dataset": None}),
    "experts, gptq": (GPTQ, {"model": "experts"}),
    "experts, static": (SEEN, {"model": "experts"}),
    "experts, autoround": (TUNED, {"model": "experts"}),
    "experts, importance": (WEIGHED, {"model": "experts", "dataset": token_batches()[:1]}),
}


SOME_CASES = ("static", "gptq", "gptq, one sample", "importance", "autoround", "stream")


def cases_of(world: int) -> Sequence[str]:
    """Return every case for two and three ranks, and one of each kind for more."""
    return list(CASES) if world < 4 else SOME_CASES


def batches() -> list[torch.Tensor]:
    return [batch for seed in range(3) for batch in token_batches(seed)]


def quantize(case: str, folder: Path, output: Path) -> Any:
    recipe, options = CASES[case]
    options = {"dataset": batches(), **options}
    name = options.pop("model", "model")
    model: Any = small_model("llama") if options.pop("loaded", False) else folder / name
    with pytest.MonkeyPatch.context() as patch:
        if name in ("bf16", "wide") and Ranks.current().is_first:  # which decides for all
            patch.setenv("STEELYARD_FORWARD", "stored")
        return oneshot(model, recipe, output_dir=output, **options)


def rows_of(rank: int) -> list[list[int]]:
    """Return 5 rows for the first rank and 7 for the second, of two lengths."""
    made = torch.randint(3, 128, (12, 24), generator=torch.Generator().manual_seed(5)).tolist()
    rows = [row[: 24 - 8 * (i % 2)] for i, row in enumerate(made)]
    return rows[:5] if rank == 0 else rows[5:]


def own_rows(model: Path, rows: list[list[int]], output: Path) -> Any:
    options: dict[str, Any] = {"batch_size": 4, "shuffle_calibration_samples": False}
    return oneshot(model, GPTQ, rows, output, **options)


def make_source(folder: Path) -> None:
    small_model("llama").save_pretrained(folder / "model")
    small_model("llama").to(torch.bfloat16).save_pretrained(folder / "bf16")
    small_model("llama", intermediate_size=256).to(torch.bfloat16).save_pretrained(folder / "wide")
    small_model("llama", tie_word_embeddings=True).save_pretrained(folder / "tied")
    multimodal_model("llava").save_pretrained(folder / "llava")
    saved("qwen3_moe", folder / "experts")


def cut_small() -> None:
    """Let small models have many shards, and many marks."""
    stream_jobs._LEAST_SHARD = 10_000
    CheckpointWriter.mark_seconds = 0.0


def contents(folder: Path) -> dict[str, bytes]:
    """Return all that is served, and not the report, which has the time that a run took."""
    files = [p for p in sorted(folder.iterdir()) if not p.name.startswith("report.")]
    return {p.name: p.read_bytes() for p in files}


# -- the worker ---------------------------------------------------------------------------------


def die_at(place: str, kind: str) -> None:
    """Let this rank end when it comes to a place."""
    at = Ranks.at

    def stopping(self: Ranks, now: str) -> None:
        at(self, now)
        if not now.startswith(place):
            return
        if kind == "memory":
            raise MemoryError("no room for the last straw")
        if kind == "late":  # after the first mark of a shard that is not complete
            mark = CheckpointWriter.mark

            def killed(self: CheckpointWriter, *args: Any) -> None:
                mark(self, *args)
                os.kill(os.getpid(), signal.SIGKILL)

            CheckpointWriter.mark = killed  # type: ignore[method-assign]
            return
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    Ranks.at = stopping  # type: ignore[method-assign]


def work_as_rank(rank: int, world: int, folder: Path, run: str, *more: str) -> None:
    torch.set_num_threads(int(more[0]) if run == "all" else 1)
    cut_small()
    stops = len(more) > 1 and more[1] == "hang"
    if stops:
        liveness._SILENCE = 8.0
    store = folder / f"store-{run.replace(' ', '-')}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        # gloo's own patience must not be what ends the ranks that wait for a stopped one
        timeout=datetime.timedelta(hours=2) if stops else datetime.timedelta(seconds=HANG),
    )
    if run == "all":
        for case in cases_of(world):
            result = quantize(case, folder.parent, folder / case)
            assert result.output_dir == (folder / case).resolve()
            assert len(result.modules) >= 21, case
        return
    if run == "own rows":
        result = own_rows(folder.parent / "model", rows_of(rank), folder / "out")
        assert any("2 ranks with data of their own (5, 7 samples" in n for n in result.notes)
        with pytest.raises(DataError, match="have different pipeline"):
            pipeline = ("sequential", "basic")[rank]
            oneshot(folder.parent / "model", STATIC, batches(), folder / "no", pipeline=pipeline)
        return
    place, kind, victim = more
    if rank == int(victim):
        die_at(place, kind)
    try:
        quantize(run, folder.parent, folder / "out")
    except BaseException as error:
        kind = type(error).__name__
        print(f"{kind}: {error}|silent={getattr(error, 'silent', None)}")
        sys.exit(3 if isinstance(error, RanksError) else 4)


# -- the tests ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_source(folder)
    return folder


@pytest.fixture(scope="module")
def alone(source: Path) -> Path:
    """What one thread of one process writes."""
    return quantize_all(source, source / "alone", threads=1)


def quantize_all(source: Path, folder: Path, threads: int) -> Path:
    before = stream_jobs._LEAST_SHARD, CheckpointWriter.mark_seconds, torch.get_num_threads()
    torch.set_num_threads(threads)
    cut_small()
    try:
        for case in CASES:
            quantize(case, source, folder / case)
            assert torch.get_num_threads() == threads
    finally:
        stream_jobs._LEAST_SHARD, CheckpointWriter.mark_seconds, threads = before
        torch.set_num_threads(threads)
    return folder


def assert_same(folder: Path, alone: Path, world: int = 1) -> None:
    for case in cases_of(world):
        expected, found = contents(alone / case), contents(folder / case)
        assert list(found) == list(expected), case
        for name, content in expected.items():
            assert found[name] == content, f"{case}: {name}"


@pytest.mark.parametrize(("world", "threads"), [*((world, 1) for world in WORLDS), (2, 2)])
def test_ranks_write_what_one_process_writes(
    world: int, threads: int, alone: Path, source: Path
) -> None:
    folder = source / f"world{world}x{threads}"
    folder.mkdir()
    codes, said = start(__file__, ["all", str(threads)], world, folder)
    assert codes == [0] * world, "\n".join(text[-2000:] for text in said)
    assert_same(folder, alone, world)


@pytest.mark.parametrize("threads", [2, 20])
def test_threads_write_what_one_writes(threads: int, alone: Path, source: Path) -> None:
    """Each batch is computed on one thread, however many there are; with 20, that is 16 of them."""
    assert_same(quantize_all(source, source / f"threads{threads}", threads), alone)


def test_cases_have_something_to_tell_apart(alone: Path) -> None:
    """Streams are cut into shards, and no two recipes come to the same."""
    assert len(list((alone / "stream").glob("*.safetensors"))) > 4
    names = ("static", "static, error propagated", "gptq, one sample")
    files = [alone / name / "model.safetensors" for name in names]
    assert not filecmp.cmp(files[0], files[1], shallow=False)
    tuned = read_provenance(alone / "tuned by the first rank")
    assert tuned is not None and tuned.changed


def test_rows_of_their_own_are_joined_in_rank_order(source: Path) -> None:
    """Also where the last batch of one rank is filled with the first rows of the next."""
    folder = source / "own"
    folder.mkdir()
    codes, said = start(__file__, ["own rows"], 2, folder)
    assert codes == [0, 0], said
    assert not (folder / "no").exists()
    own_rows(source / "model", [*rows_of(0), *rows_of(1)], folder / "alone")
    assert contents(folder / "out") == contents(folder / "alone")


# -- ranks that end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "place", "kind", "victim", "message"),
    [
        ("gptq", "model.layers.1", "kill", 1, "rank 1 does not answer"),
        ("static", "model.layers.2", "kill", 0, "rank 0"),
        ("stream", "shard", "kill", 1, "rank 1 does not answer"),
        ("stream", "shard", "late", 1, "rank 1 does not answer"),
        ("gptq", "model.layers.2", "memory", 1, "rank 1 failed: MemoryError: no room"),
        ("static", "model.layers.1", "hang", 1, "rank 1 does not answer"),
    ],
)
def test_a_rank_that_ends_is_named_and_the_run_goes_on_later(
    case: str,
    place: str,
    kind: str,
    victim: int,
    message: str,
    source: Path,
    alone: Path,
) -> None:
    folder = source / f"{case}-{kind}-{victim}"
    folder.mkdir()
    stopped = [victim] if kind == "hang" else []
    codes, said = start(__file__, [case, place, kind, str(victim)], 3, folder, stopped)
    survivors = [rank for rank in range(3) if rank != victim]
    for rank in survivors:
        assert codes[rank] == 3, said
        assert message in said[rank]
        assert not any(f"rank {other} does" in said[rank] for other in survivors)  # but busy
        if kind != "memory" and case != "stream":
            assert f"last heard of at {place}" in said[rank] or victim == 0
    speaking = [rank for rank, text in enumerate(said) if "silent=False" in text]
    if kind == "memory":
        assert codes[victim] == 4
        assert speaking == [victim]
    elif victim != 0:  # who holds the store in this world
        assert len(speaking) == 1
    assert not (folder / "out").exists()

    # two ranks go on where three came to
    again = source / f"{case}-{kind}-{victim}-again"
    again.mkdir()
    for path in folder.iterdir():
        if path.name.endswith(".steelyard"):
            path.rename(again / path.name)
    kept = list(again.iterdir())
    codes, said = start(__file__, [case, "nowhere", "kill", "0"], 2, again)
    assert codes == [0, 0], said
    assert kept
    assert contents(again / "out") == contents(alone / case)


if __name__ == "__main__":
    work_as_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
