"""Tensors of a complete checkpoint are replaced all at once, whenever the run is killed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from families import read, small_model, token_batches
from interruption import Stop, lasting

from steelyard import oneshot
from steelyard.algorithms import Algorithm, Needs
from steelyard.algorithms.finished_checkpoint import FinishedCheckpoint
from steelyard.checkpoint import CheckpointWriter, Shards
from steelyard.checkpoint.growing_shards import GrowingShards
from steelyard.engine import output
from steelyard.errors import CheckpointError
from steelyard.modifiers import Modifier, QuantizationModifier

SCALES, GAIN = ".weight_scale", "model.norm.weight"
WEIGHTS = {"num_bits": 8, "strategy": "channel", "observer": "memoryless_minmax"}
CHANNEL = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}


@Modifier.register("Doubled")
class Doubled(Modifier):
    """Doubles all scales of the checkpoint, and one gain."""

    algorithm: ClassVar[str] = "doubled"
    wrong: str = ""


@Algorithm.register("doubled")
class Double(Algorithm):
    calls: ClassVar[int] = 0
    modifier: Doubled

    @property
    def needs(self) -> Needs:
        return Needs(samples=True)

    def finish(self, checkpoint: FinishedCheckpoint) -> dict[str, torch.Tensor]:
        Double.calls += 1
        assert checkpoint.samples.num_samples == 6
        with Shards(checkpoint.folder) as files:
            if self.modifier.wrong == "shape":
                return {GAIN: files.read(GAIN)[:-1]}
            if self.modifier.wrong == "name":
                return {"model.norm.bias": torch.ones(1)}
            names = [name for name in files if name.endswith(SCALES)]
            return {name: files.read(name) * 2 for name in [*names, GAIN]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "source"
    small_model("llama").save_pretrained(folder, max_shard_size="200KB")
    return folder


def run(source: Path, out: Path, *more: Modifier) -> Any:
    """Quantize, with shards of a few tensors."""
    recipe = [QuantizationModifier(config_groups=CHANNEL, ignore=["lm_head"]), *more]
    made = GrowingShards.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrowingShards, "__init__", lambda self, path, _: made(self, path, 40_000))
        return oneshot(source, recipe, token_batches() if more else None, out)


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {file.name: hashlib.sha256(lasting(file)).hexdigest() for file in files}


def test_tensors_are_replaced_recorded_and_validated(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "before")
    result = run(source, tmp_path / "after", Doubled())
    before, after = read(tmp_path / "before"), read(tmp_path / "after")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        factor = 2 if name == GAIN or name.endswith(SCALES) else 1
        assert torch.equal(after[name], tensor * factor if factor == 2 else tensor), name
    assert result.changed == [GAIN]
    # twice a weight is as far from it as the weight is large
    assert all(0.9 < module.error < 1.1 for module in result.modules.values())
    assert len(list((tmp_path / "after").glob("*.safetensors"))) > 3


def _stopping(patch: pytest.MonkeyPatch, where: str) -> None:
    """Let a run end at a moment of the last phase."""

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Stop

    def after(owner: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def stopping(*args: Any, **kwargs: Any) -> None:
            method(*args, **kwargs)
            raise Stop

        patch.setattr(owner, name, stopping)

    if where == "before":
        patch.setattr(Double, "finish", stop)
    elif where == "written, not recorded":
        after(GrowingShards, "rewrite")
    elif where == "half written":
        close = GrowingShards._temporary
        calls = [0]

        def second(self: GrowingShards, position: int) -> Path:
            calls[0] += 1
            if calls[0] > 1:
                raise Stop
            return close(self, position)

        rewrite = GrowingShards.rewrite

        def rewriting(self: GrowingShards, *args: Any) -> None:
            patch.setattr(GrowingShards, "_temporary", second)
            rewrite(self, *args)

        patch.setattr(GrowingShards, "rewrite", rewriting)
    elif where == "recorded, not renamed":
        replace = CheckpointWriter.replace

        def replacing(self: CheckpointWriter, *args: Any) -> None:
            patch.setattr(GrowingShards, "name_all", stop)
            replace(self, *args)

        patch.setattr(CheckpointWriter, "replace", replacing)
    else:
        patch.setattr(output, "check_written", stop)


WHERE = ["before", "half written", "written, not recorded", "recorded, not renamed", "in place"]


@pytest.mark.parametrize("where", WHERE)
def test_a_run_that_is_killed_in_the_last_phase_resumes(
    where: str, source: Path, tmp_path: Path
) -> None:
    run(source, tmp_path / "whole", Doubled())
    expected, original = contents(tmp_path / "whole"), contents(source)
    Double.calls = 0
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        _stopping(patch, where)
        run(source, out, Doubled())
    assert not out.exists()
    result = run(source, out, Doubled())
    assert contents(out) == expected
    assert contents(source) == original
    assert result.changed == [GAIN]
    repeated = where in ("half written", "written, not recorded")
    assert Double.calls == (2 if repeated else 1)


@pytest.mark.parametrize(("wrong", "why"), [("shape", "cannot become"), ("name", "has none")])
def test_a_wrong_tensor_is_refused(wrong: str, why: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=why):
        run(source, tmp_path / "out", Doubled(wrong=wrong))
    assert not (tmp_path / "out").exists()
