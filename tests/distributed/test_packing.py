"""What ranks send each other: any value that a run exchanges, and nothing that could be run."""

from __future__ import annotations

import ast
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import steelyard
from steelyard.algorithms import ModuleResult
from steelyard.checkpoint.header import DTYPE_NAMES
from steelyard.distributed.packing import pack, unpack
from steelyard.errors import RanksError
from steelyard.observers.hessians import Partial  # declared there

SOURCE = Path(steelyard.__file__).parent
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())  # lone surrogates among them
    | st.binary()
    | st.sampled_from([torch.float32, torch.int8, torch.float8_e4m3fn])
    | st.builds(Path, st.sampled_from(["/a/b", "c"])),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.text()), inner)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and all within them of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return bool(one == other)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_infinite_and_undefined_floats() -> None:
    low, high, undefined = unpack(pack([float("-inf"), float("inf"), float("nan")]))
    assert low == float("-inf") and high == float("inf") and undefined != undefined


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.values())
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_tensors_of_every_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    value = (raw if dtype.itemsize > 1 else raw[..., 0]).view(dtype).reshape(shape)
    odd = torch.ones(3, dtype=torch.uint8)  # what follows it lies at no multiple of its size
    first, found = unpack(pack((odd, value)))
    assert_close(first, odd)
    assert found.dtype == dtype and found.shape == shape
    assert torch.equal(_bytes(found), _bytes(value))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_tensors_have_memory_of_their_own() -> None:
    message = pack({"a": torch.ones(4).t(), "b": torch.nn.Parameter(torch.ones(2))})
    found = unpack(message)
    message.zero_()
    assert_close(found, {"a": torch.ones(4), "b": torch.ones(2)})


def test_dataclasses_that_a_run_exchanges() -> None:
    module = ModuleResult(0.25, 7, {"figures": {"bits": 4}})
    part = Partial(2, 3, torch.arange(4.0))
    found, other = unpack(pack([module, part]))
    assert found == module
    assert isinstance(other, Partial) and (other.start, other.stop) == (2, 3)
    assert_close(other.value, part.value)


@dataclass
class Undeclared:
    value: int


@pytest.mark.parametrize("value", [Undeclared(1), {1, 2}, print, 1j, torch.nn.Linear(1, 1)])
def test_what_was_not_declared_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match=f"cannot send a {type(value).__qualname__}"):
        pack([value])


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickle_is_not_run(tmp_path: Path) -> None:
    """One rank that was taken over must not take over the others."""
    raw = pickle.dumps(Bomb(tmp_path / "marker"))
    for message in (raw, len(raw).to_bytes(8, "little") + raw):
        with pytest.raises(RanksError, match="same version of Steelyard"):
            unpack(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"nonsense": 1}',
        '{"Path": {"a": 1}}',
        '{"tensor": ["float32", [9], 0, 4]}',
        '{"tensor": ["nn", [1], 0, 4]}',
        '{"a": 1, "b": 2}',
        '{"ModuleResult": {"other": 1}}',
        '{"apart": 0}',
        "{",
    ],
)
@pytest.mark.parametrize("whole", ["[{},[]]", "{}", "[{}]"])
def test_malformed_message(text: str, whole: str) -> None:
    text = whole.replace("{}", text)
    message = len(text).to_bytes(8, "little") + text.encode() + bytes(4)
    with pytest.raises(RanksError, match="cannot decode"):
        unpack(torch.frombuffer(bytearray(message), dtype=torch.uint8))


UNPICKLING = {"load": "torch"} | dict.fromkeys(
    f"{verb}_object{ending}"
    for verb in ("all_gather", "gather", "scatter", "broadcast", "send", "recv")
    for ending in ("", "_list")
)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.name)
def test_nobody_unpickles(path: Path) -> None:
    """No file of the package reads pickles: not by itself, and not through torch."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "dill", "cloudpickle", "joblib"}
        if isinstance(node, ast.Attribute) and node.attr in UNPICKLING:
            of = UNPICKLING[node.attr]
            assert of is not None and ast.unparse(node.value) != of
