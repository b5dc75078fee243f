"""Batches that run in parts: as one whole, whatever the family and the number of parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import small_model
from torch.testing import assert_close

from steelyard.engine.stages import Staged
from steelyard.errors import PipelineError
from steelyard.model.batch_forward import BatchForward, BatchLimit, run_in_parts, with_first_part
from steelyard.model.batch_parts import joined, row_ranges, samples_in
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.placeholders import first_tensor
from steelyard.observers.padding import real_tokens

FAMILIES = ["llama", "qwen3_moe", "gemma3", "phi3", "gpt2", "opt"]
ROWS, LENGTH = 5, 12


class Prepared:
    """A small model whose calls are recorded for one batch.

    fits: samples that its device holds at a time
    """

    def __init__(self, family: str = "llama", padded: bool = True) -> None:
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 128, (ROWS, LENGTH), generator=drawn)
        mask = torch.ones_like(ids)
        if padded:
            mask[1, 9:] = 0
            mask[4, 7:] = 0
        self.model: Any = small_model(family, torch.float32)
        self.sequence = LayerSequence(self.model)
        self.batch = Batch({"input_ids": ids, "attention_mask": mask})
        self.fits, self.limit = ROWS, BatchLimit()
        run = self.sequence.run

        def limited(index: int, batch: Batch, module: Any = None) -> Any:
            if len(batch.inputs["input_ids"]) > self.fits:
                raise torch.OutOfMemoryError("toy out of memory. Tried to allocate")
            return run(index, batch, module)

        self.sequence.run = limited  # type: ignore[method-assign]
        with self.sequence:
            self.sequence.advance(self.batch, 0)

    @property
    def forward(self) -> BatchForward:
        return BatchForward(self.sequence, 0, self.batch, self.limit)


@pytest.mark.parametrize("fits", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_that_of_the_whole(family: str, fits: int) -> None:
    prepared = Prepared(family)
    with prepared.sequence, torch.no_grad():
        whole = first_tensor(prepared.forward())
        prepared.fits = fits
        found = first_tensor(run_in_parts(prepared.forward))
    assert_close(found, whole)
    assert prepared.limit.most == min(fits, ROWS // 2)  # 5, 2, 1
    assert len(prepared.forward.parts()) == -(-ROWS // prepared.limit.most)
    words = f"ran out of memory with 5 samples of {LENGTH} tokens at a time; the run went on with 2"
    assert words in prepared.limit.notes[0]


def test_one_sample_that_does_not_fit() -> None:
    prepared = Prepared()
    prepared.fits = 0
    words = "layers.0: out of memory on the device with 1 sample of 12 tokens at a time"
    with prepared.sequence, torch.no_grad(), pytest.raises(PipelineError, match=words):
        run_in_parts(prepared.forward)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("fits", [ROWS, 2, 1])
def test_a_stage_sees_a_batch_as_a_whole(fits: int, padded: bool) -> None:
    """In two of three batches, beside one; the last does not fit when it continues."""
    prepared = Prepared(padded=padded)
    layer = prepared.sequence.modules[0]
    stages = [[layer.self_attn.q_proj], [layer.mlp.down_proj]]
    seen: list[tuple[int, torch.Tensor]] = []

    def see(index: int, x: torch.Tensor) -> None:
        seen.append((index, real_tokens(x, "input").reshape(-1, x.shape[-1]).clone()))

    def run(limited: int) -> list[torch.Tensor]:
        prepared.fits = limited
        forwards = [prepared.forward] * 3
        staged: Staged[Any] = Staged(stages, forwards, [ROWS * LENGTH] * 3, 1 << 40)
        with prepared.sequence, torch.no_grad(), staged:
            for stage in range(2):
                staged.run_to(stage, see)
            return list(staged.finish())

    expected, wholes = run(ROWS), list(seen)
    seen.clear()
    found = run(fits)
    assert len(found) == 3
    assert_close(found, expected)
    assert [index for index, _ in seen] == [0, 1, 2] * 2
    assert_close([x for _, x in seen], [x for _, x in wholes])


def test_a_part_stands_for_the_batch() -> None:
    prepared = Prepared()
    prepared.fits = 2
    with prepared.sequence, torch.no_grad():
        used = with_first_part(lambda run, n: (run(), n), prepared.forward, ROWS * LENGTH)
    assert first_tensor(used[0]).shape[:2] == (2, LENGTH)
    assert used[1] == 2 * LENGTH


def test_batches_that_cannot_be_cut() -> None:
    """A square one has dimensions that cannot be told apart; pixels belong to no sample."""
    ids = torch.ones(3, 4, dtype=torch.int64)
    assert samples_in({"input_ids": ids, "attention_mask": ids}) == 3
    assert samples_in({"input_ids": ids[:, :3]}) == 1
    assert samples_in({"input_ids": ids, "pixel_values": torch.zeros(7, 2)}) == 1
    error = torch.OutOfMemoryError("toy")
    prepared = Prepared()
    prepared.sequence.is_stateful, prepared.fits = True, 1
    with prepared.sequence, torch.no_grad(), pytest.raises(type(error)):
        run_in_parts(prepared.forward)


def test_outputs_of_every_structure() -> None:
    parts = [{"a": (torch.full((n, 2), n), None)} for n in (1, 2)]
    assert joined(parts)["a"][0].tolist() == [[1, 1], [2, 2], [2, 2]]
    assert joined(parts)["a"][1] is None
    assert row_ranges(4, 9) == [range(4)]
