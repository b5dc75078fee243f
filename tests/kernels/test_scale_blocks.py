"""What shares a scale, and whether it divides a weight."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationArgs

from steelyard.errors import StrategyError
from steelyard.kernels.scale_blocks import block_of, blocks_in, divides, group_count, scale_shape

GROUP = {"strategy": "group", "group_size": 128}
BLOCK = {"strategy": "block", "block_structure": [128, 64], "type": "float"}


@pytest.mark.parametrize(
    ("options", "block", "shape"),
    [
        ({"strategy": "tensor"}, (48, 384), (1,)),
        ({"strategy": "channel"}, (1, 384), (48, 1)),
        (GROUP, (1, 128), (48, 3)),
        (BLOCK, (128, 64), (1, 6)),
        ({"strategy": "tensor_group", "group_size": 16}, (1, 16), (48, 24)),
    ],
)
def test_what_shares_a_scale(
    options: dict[str, object], block: tuple[int, int], shape: tuple[int, ...]
) -> None:
    args = QuantizationArgs(**options)
    assert block_of(args, 48, 384) == block
    assert scale_shape(args, (48, 384)) == shape
    if shape != (1,):
        assert (blocks_in(48, block[0]), blocks_in(384, block[1])) == shape


def test_blocks_are_cut_off_at_the_edge_and_groups_are_not() -> None:
    assert scale_shape(QuantizationArgs(**BLOCK), (200, 100)) == (2, 2)
    with pytest.raises(
        StrategyError, match=r"shape \(48, 200\) does not divide into groups of 128.*divides 200"
    ):
        scale_shape(QuantizationArgs(**GROUP), (48, 200))


@pytest.mark.parametrize(
    ("size", "length", "expected"),
    [(128, 384, True), (128, 200, False), (1, 7, True), (8, 4, False), (0, 4, False), (4, 0, True)],
)
def test_divides(size: int, length: int, expected: bool) -> None:
    assert divides(size, length) is expected


def test_groups_without_a_size_are_refused() -> None:
    args = QuantizationArgs(**GROUP).model_copy(update={"group_size": None})
    with pytest.raises(StrategyError, match="groups of 0"):
        group_count(args, (2, 8))


def test_activations_have_no_stored_block() -> None:
    with pytest.raises(StrategyError, match="'token' does not apply to weights"):
        block_of(QuantizationArgs(strategy="token", dynamic=True), 2, 2)
