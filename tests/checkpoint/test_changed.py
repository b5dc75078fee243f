"""Tensors that a run changed without quantizing them: claimed, carried and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.checkpoint import CheckpointWriter, check_checkpoint
from steelyard.checkpoint.provenance import PROVENANCE, read_provenance
from steelyard.formats import stored_tensors
from steelyard.observers import Observer

MakeModel = Callable[..., Any]
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
Q = "model.layers.0.q_proj"


def write_changed(model: Any, value: torch.Tensor, changed: list[str]) -> Path:
    model.stored[NORM] = value
    folder: Path = model.write(changed=changed)
    return folder


def test_claimed_tensor_may_differ_and_others_may_not(small_model: MakeModel) -> None:
    model = small_model()
    model.stored[HEAD] = model.stored[HEAD] * 2
    folder = write_changed(model, model.source.read(NORM) * 2, [NORM])
    found = check_checkpoint(folder, source=model.source)
    assert found.problems == [f"{HEAD} is not quantized, but its values differ from the source"]
    assert found.notes[0] == (
        f"1 tensor that the run changed, such as {NORM}: compared with the source by type and "
        "shape alone"
    )


@pytest.mark.parametrize("claims", ["given", "in provenance.json"])
def test_where_the_claim_comes_from(small_model: MakeModel, claims: str) -> None:
    """During a run there is no provenance.json yet, so the claims are given."""
    model = small_model()
    model.stored[NORM] = model.source.read(NORM) * 2
    given = claims == "given"
    folder = model.write(changed=[] if given else [NORM])
    options = {"changed": {NORM}, "digests": False} if given else {}
    assert check_checkpoint(folder, source=model.source, **options).problems == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t[:255].clone(), "torch.bfloat16 (255,); the source has torch.bfloat16 (256,)"),
        (lambda t: t.float(), "torch.float32 (256,); the source has torch.bfloat16 (256,)"),
        (lambda t: t.index_fill(0, torch.tensor([3]), torch.nan), "holds 1 NaN of 256 values"),
        (lambda t: t.index_fill(0, torch.tensor([3]), torch.inf), "holds 1 infinite of 256 values"),
    ],
)
def test_claimed_tensor_keeps_type_and_shape_and_is_finite(
    small_model: MakeModel, change: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    model = small_model()
    folder = write_changed(model, change(model.source.read(NORM)), [NORM])
    problems = check_checkpoint(folder, source=model.source).problems
    assert len(problems) == 1
    assert problems[0].startswith(NORM) and expected in problems[0]


def test_claim_of_a_tensor_that_is_not_there(small_model: MakeModel) -> None:
    model = small_model()
    folder = model.write(changed=["model.nrom.weight"])
    assert check_checkpoint(folder, source=model.source).problems == [
        "model.nrom.weight is listed as changed, but there is no such tensor"
    ]


def requantized(model: Any, weight: torch.Tensor) -> None:
    args = model.scheme.weights
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    found = {f"weight_{k}": v for k, v in observer(weight).get_qparams().items() if v is not None}
    for local, part in stored_tensors(weight, found, model.scheme).items():
        model.stored[f"{Q}.{local}"] = part


def test_weight_that_was_changed_before_it_was_quantized(small_model: MakeModel) -> None:
    """As smoothing does: the source's weight is not what the stored codes stand for."""
    model = small_model()
    columns = torch.linspace(0.1, 10, 256, dtype=torch.bfloat16)
    requantized(model, model.source.read(f"{Q}.weight") * columns)
    folder = model.write()
    (problem,) = check_checkpoint(folder, source=model.source).problems
    assert problem.startswith(f"{Q}.weight decodes to values that are")
    folder = model.write(changed=[f"{Q}.weight"])
    assert check_checkpoint(folder, source=model.source).problems == []


def test_changed_weight_that_decodes_to_nan(small_model: MakeModel) -> None:
    model = small_model("FP8_DYNAMIC")
    codes = model.stored[f"{Q}.weight"].view(torch.uint8)
    codes[0, 0] = 0x7F  # NaN in E4M3
    folder = model.write(changed=[f"{Q}.weight"])
    assert check_checkpoint(folder, source=model.source).problems == [
        f"{Q}.weight decodes to values that are not finite"
    ]


# -- the claim on its way -------------------------------------------------------------------------


def test_claims_survive_a_kill(tmp_path: Path) -> None:
    options: Any = {"identity": {"recipe": "r"}}
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointWriter(tmp_path / "out", **options) as writer,
    ):
        writer.add("a", torch.zeros(2))
        writer.claim(["a"])
        writer.mark({})
        raise KeyboardInterrupt
    with CheckpointWriter(tmp_path / "out", **options) as writer:
        assert writer.changed == {"a"}
        writer.add("b", torch.zeros(2))
        out = writer.finish({}, changed=["b"])
    provenance = read_provenance(out)
    assert provenance is not None and provenance.changed == ["a", "b"]


def test_without_claims_provenance_does_not_speak_of_them(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("a", torch.zeros(2))
        out = writer.finish({})
    assert '"changed"' not in (out / PROVENANCE).read_text()
