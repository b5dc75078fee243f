"""Checkpoints beside each other: the figures of separate evaluations, from one run of the base."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import quantize, samples
from families import small_model
from foreign_checkpoint import write_foreign

from steelyard.errors import OptionError, PipelineError
from steelyard.evaluate import evaluate
from steelyard.evaluate.checkpoint_comparison import _short, compare_checkpoints
from steelyard.model.layerwise import LayerwiseModel

SIZES = {"hidden_size": 256, "intermediate_size": 256}
DATA = [*samples(seed=4, length=70), *samples(seed=5, length=70)]


class Made(NamedTuple):
    base: Path
    folders: list[Path]  # 8 bits, 4 bits, and 4 bits of another tool


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("compared")
    small_model("llama", **SIZES).save_pretrained(folder / "m")
    ours = [quantize(folder / "m", folder / name, scheme=name) for name in ("W4A16", "W8A16")]
    theirs = write_foreign(folder / "m", folder / "theirs", "W4A16")
    return Made(folder / "m", [*ours, theirs])


def test_figures_are_those_of_separate_evaluations(made: Made) -> None:
    found = compare_checkpoints(made.base, made.folders, DATA).checkpoints
    assert sorted(each.name for each in found) == ["W4A16", "W8A16", "theirs"]
    assert found[0].name == "W8A16", "the closest first"
    for each in found:
        expected = evaluate(made.base, each.folder, DATA).as_dict()
        shown = each.evaluation.as_dict()
        assert {**shown, "seconds": 0} == {**expected, "seconds": 0}
        assert each.nbytes == sum(p.stat().st_size for p in each.folder.glob("*.safetensors")) - (
            header_bytes(each.folder)
        )
    divergences = [each.evaluation.kl_divergence for each in found]
    assert divergences == sorted(divergences)
    for each in found:
        assert each.behind == pytest.approx(each.evaluation.kl_divergence - divergences[0])
    assert (found[0].behind, found[0].within_noise) == (0.0, True)
    assert found[1].behind_error is not None and found[1].behind_error < 1
    assert {each.name: each.schemes for each in found} == {
        "W4A16": {"W4A16": 21},
        "W8A16": {"W8A16": 21},
        "theirs": {"W4A16": 21},
    }
    bits = {each.name: each.bits_per_weight for each in found}
    assert bits["W4A16"] == bits["theirs"] == pytest.approx(4.13, abs=0.01)
    assert {each.name: each.report is not None for each in found} == {
        "W4A16": True,
        "W8A16": True,
        "theirs": False,
    }


def header_bytes(folder: Path) -> int:
    """Return the bytes of a shard that hold no tensor."""
    (path,) = folder.glob("*.safetensors")
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_noise_is_that_of_the_differences(made: Made) -> None:
    """A copy cannot be told from the original, though both have a standard error."""
    first, second = compare_checkpoints(made.base, [made.folders[0]] * 2, DATA).checkpoints
    assert second.behind == second.behind_error == 0 and second.within_noise
    assert first.evaluation.kl_error is not None and first.evaluation.kl_error > 0
    assert first.smallest and not second.smallest


def test_the_base_runs_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    run, roles = LayerwiseModel.run, []

    def counting(self: LayerwiseModel, *args: object) -> object:
        roles.append(self.role)
        return run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerwiseModel, "run", counting)
    compare_checkpoints(made.base, made.folders, DATA)
    assert roles == ["base", *["quantized"] * 3]


def test_hidden_states_in_files_change_nothing(made: Made) -> None:
    one, other = (
        compare_checkpoints(made.base, made.folders, DATA, memory=memory).checkpoints
        for memory in (0, 1 << 40)
    )
    assert [each.evaluation.kl_divergence for each in one] == [
        each.evaluation.kl_divergence for each in other
    ]


def test_another_model_is_refused_before_any_runs(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model("llama", num_hidden_layers=1, **SIZES).save_pretrained(tmp_path / "small")
    monkeypatch.setattr(LayerwiseModel, "run", pytest.fail)
    with pytest.raises(PipelineError, match=r"3 layers.*1"):
        compare_checkpoints(made.base, [made.folders[0], tmp_path / "small"], DATA)
    with pytest.raises(OptionError, match="no checkpoint"):
        compare_checkpoints(made.base, [], DATA)


def test_the_original_itself_may_be_among_them(made: Made) -> None:
    first, _ = compare_checkpoints(made.base, [made.folders[0], made.base], DATA).checkpoints
    assert first.evaluation.kl_divergence == 0 and first.bits_per_weight is None
    assert first.schemes == {} and not math.isnan(first.behind)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["out/w4/", "out/w8"], ["w4", "w8"]),
        (["a/q", "b/q"], ["a/q", "b/q"]),
        (["org/name", "name"], ["org/name", "name"]),
        (["same", "same"], ["same", "same"]),
    ],
)
def test_short_names(names: list[str], short: list[str]) -> None:
    assert _short(names) == short


def test_more_tokens_than_runs_need(made: Made) -> None:
    """One run of 64 tokens has no standard error, and so nothing is beyond noise."""
    few = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(1)).tolist()
    found = compare_checkpoints(made.base, made.folders[:2], few).checkpoints
    assert [each.behind_error for each in found] == [None, None]
    assert all(each.within_noise for each in found)
