"""Stand-ins for the outputs of layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from steelyard.errors import PipelineError
from steelyard.model.placeholders import (
    Ref,
    Touched,
    Unknown,
    filled,
    first_tensor,
    places_in,
    refs_in,
    replaced,
    structure_of,
)

HIDDEN = torch.zeros(2, 3, 4)


def unknown(layer: int = 7) -> Unknown:
    return Unknown.of(Ref(layer, ()), HIDDEN)


def test_a_stand_in_tells_shape_and_type() -> None:
    made = unknown()
    assert made.shape == (2, 3, 4) and made.size(1) == 3 and made.ndim == 3 and len(made) == 2
    assert made.dtype == torch.float32 and made.device == HIDDEN.device
    assert isinstance(made, torch.Tensor)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: x[0],
        lambda x: x * x,
        lambda x: x.to(torch.float64),
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: torch.stack([HIDDEN, x]),
        lambda x: HIDDEN.clone().add_(x),
        lambda x: HIDDEN.clone().__setitem__(0, x[0]),
        lambda x: list(x),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
    ],
)
def test_whatever_needs_values_says_of_which_layer(use: Callable[[Any], Any]) -> None:
    with pytest.raises(Touched) as caught:
        use(unknown())
    assert caught.value.layers == {7}


def test_an_operation_on_several_names_all_of_them() -> None:
    with pytest.raises(Touched) as caught:
        torch.cat([unknown(1), HIDDEN, unknown(4)])
    assert caught.value.layers == {1, 4}


def test_a_stand_in_of_unknown_shape_does_not_tell_one() -> None:
    made = Unknown.of(Ref(2, (1,)), None)
    with pytest.raises(Touched):
        _ = made.shape


def test_an_output_is_rebuilt_from_its_structure() -> None:
    other = torch.ones(5)
    output = (HIDDEN, None, [other, {"a": HIDDEN}])
    structure = structure_of(output, HIDDEN, "layers.0")
    parts: list[Any] = ["hidden", None, {"list": ["tensor", {"dict": {"a": "hidden"}}]}]
    assert structure == {"tuple": parts}
    assert json.loads(json.dumps(structure)) == structure
    tensors = dict(places_in(output))
    rebuilt = filled(structure, lambda place, kind: tensors[place])
    assert rebuilt[1] is None and isinstance(rebuilt[2], list)
    assert_close(rebuilt[2][0], other)
    assert first_tensor(output) is HIDDEN
    for place, tensor in tensors.items():
        assert Ref(0, place).of(output) is tensor


def test_an_object_that_cannot_be_kept_is_refused_with_its_layer() -> None:
    with pytest.raises(PipelineError, match=r"layers.3 returns a object.*basic"):
        structure_of((HIDDEN, object()), HIDDEN, "layers.3")


def test_references_are_found_in_arguments() -> None:
    refs = [Ref(1, ()), Ref(2, (0,))]
    args = ((refs[0], 3), {"a": [refs[1]]})
    assert list(refs_in(args)) == refs
    assert replaced(args, lambda v: "x" if isinstance(v, Ref) else v) == (("x", 3), {"a": ["x"]})
