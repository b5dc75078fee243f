"""Checkpoints made to do harm: each is refused with a clear error, or read as safetensors reads it.

safetensors itself is the oracle. What it refuses must be refused; what it opens must open with the
same content, but for the cases that `STRICTER` lists.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import itertools
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from steelyard.checkpoint import CheckpointWriter
from steelyard.checkpoint.header import DTYPE_NAMES
from steelyard.checkpoint.shard_index import INDEX, SINGLE
from steelyard.checkpoint.shards import Shards
from steelyard.errors import CheckpointError

STRICTER = re.compile(
    r"has the key .* twice"  # which one counts depends on the reader
    r"|names a tensor .* characters"  # a name that cannot be printed
    r"|, expected dtype, shape, data_offsets"  # fields that mean we do not know what
    r"|has type .* convert it"  # types that have no use here
    r"|product fits into 64 bits"  # empty, with sizes that torch cannot hold
)


@contextlib.contextmanager
def no_hang(seconds: float = 30) -> Iterator[None]:
    """Fail instead of waiting for ever; no measure of speed."""

    def give_up(*_: object) -> None:
        pytest.fail("hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pack(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(shape: Any = (2,), offsets: Any = (0, 2), dtype: Any = "U8", **more: Any) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def raw_entry(field: bytes = b'"shape":[2]') -> bytes:
    """A header with one tensor, whose shape is replaced by text that `json.dumps` cannot write."""
    return b'{"x":{"dtype":"U8",' + field + b',"data_offsets":[0,2]}}'


def refuses(folder: Path, *words: str) -> None:
    with no_hang(), pytest.raises(CheckpointError) as caught:
        Shards(folder)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 1_000
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", str(caught.value))


Content = dict[str, tuple[str, list[int], bytes]]


def oracle(path: Path) -> Content | None:
    """What safetensors reads; None if it refuses the file."""
    content = {}
    try:
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part, raw = opened.get_slice(name), b""
                with contextlib.suppress(SafetensorError, TypeError):  # types and sizes torch lacks
                    raw = bytes(opened.get_tensor(name).reshape(-1).view(torch.uint8).tolist())
                content[name] = part.get_dtype(), part.get_shape(), raw
    except SafetensorError:
        return None
    return content


def ours(folder: Path) -> Content:
    content = {}
    with Shards(folder) as shards:
        for name in shards:
            info, value = shards.info(name), shards.read(name)
            raw = bytes(value.reshape(-1).view(torch.uint8).tolist())
            assert (value.dtype, tuple(value.shape)) == (info.dtype, info.shape)
            content[name] = DTYPE_NAMES[info.dtype], [*info.shape], raw
    return content


def compare(folder: Path) -> str:
    """Hold both readers against each other; return what happened: "opened", or our message."""
    theirs = oracle(folder / SINGLE)
    try:
        with no_hang():
            read = ours(folder)
    except CheckpointError as error:
        assert theirs is None or STRICTER.search(str(error)), (theirs, str(error))
        assert SINGLE in str(error)
        return str(error)
    assert read == theirs
    return "opened"


# -- headers, one by one -----------------------------------------------------------------------

AB = b"ab"
NOT_HEADER = ("not a safetensors file", "git lfs pull")
SHAPE = ("x in", "has shape", "not a list of whole numbers", "save the model again")
OFFSETS = ("x in", "data_offsets", "not a start and an end", "save the model again")
FIELDS = ("x in", ", expected dtype, shape, data_offsets", "save the model again")
NAME = ("names a tensor", "rename it")

REFUSED = {
    "nothing in it": (b"", ["0 bytes", "too few", "incomplete"]),
    "less than a length": (b"abc", ["3 bytes", "too few", "incomplete"]),
    "a length and no header": (bytes(8), NOT_HEADER),
    "length over the limit": (
        pack({"x": entry()}, AB, 100_000_001),
        ["100,000,001", "100,000,000"],
    ),
    "length of 64 bits": (b"\xff" * 8 + b"{}", ["18,446,744,073,709,551,615", *NOT_HEADER]),
    "length beyond the file": (pack({}, b"", 3), ["10 bytes", "takes 11", "incomplete"]),
    "length that cuts the header": (pack({"x": entry()}, AB, 9), NOT_HEADER),
    "not UTF-8": (pack(b'{"\xff":1}'), ["utf-8", *NOT_HEADER]),
    "UTF-16": (pack('{"x":1}'.encode("utf-16")), NOT_HEADER),
    "byte order mark": (pack(b"\xef\xbb\xbf{}"), NOT_HEADER),
    "text after the header": (pack(b"{} x"), NOT_HEADER),
    "zeros after the header": (pack(b"{}\0\0"), NOT_HEADER),
    "a list": (pack([]), ["[]", "not an object", *NOT_HEADER]),
    "null": (pack(None), ["None", "not an object"]),
    "nested lists": (pack(b"[" * 100_000), ["nested too deeply"]),
    "nested objects": (pack(b'{"x":' * 100_000), ["nested too deeply"]),
    "deep in a shape": (pack(raw_entry(b'"shape":' + b"[" * 130 + b"]" * 130), AB), SHAPE),
    "metadata is a list": (pack({"__metadata__": []}), ["__metadata__ []", "text to text"]),
    "metadata is a number": (pack({"__metadata__": 3}), ["__metadata__ 3", "text to text"]),
    "metadata to numbers": (pack({"__metadata__": {"a": 1}}), ["{'a': 1}", "text to text"]),
    "metadata half a character": (pack({"__metadata__": {"a": "\ud800"}}), ["text to text"]),
    "metadata twice": (pack(b'{"__metadata__":{},"__metadata__":{}}'), ["'__metadata__' twice"]),
    "field twice": (pack(raw_entry(b'"shape":[2],"shape":[2]'), AB), ["'shape' twice"]),
    "name twice, apart": (
        pack(raw_entry()[:-1] + b"," + raw_entry()[1:].replace(b"[0,2]", b"[2,4]"), b"abcd"),
        ["'x' twice"],
    ),
    "entry is a number": (pack({"x": 3}), ["has 3", *FIELDS]),
    "entry is NaN": (pack({"x": float("nan")}), ["has nan", *FIELDS]),
    "field missing": (pack({"x": {"dtype": "U8", "shape": [2]}}, AB), ["['dtype', 'sha", *FIELDS]),
    "field NaN": (pack({"x": entry(extra=float("nan"))}, AB), FIELDS),
    "field of 5,000 digits": (pack(raw_entry(b'"a":' + b"9" * 5_000), AB), FIELDS),
    "type unknown": (pack({"x": entry(dtype="F3")}, AB), ["x in", "type 'F3'", "convert"]),
    "type in small letters": (pack({"x": entry(dtype="u8")}, AB), ["x in", "type 'u8'"]),
    "type is a number": (pack({"x": entry(dtype=8)}, AB), ["x in", "type 8"]),
    "type is a list": (pack({"x": entry(dtype=["U8"])}, AB), ["x in", "type ['U8']"]),
    "type acts on the terminal": (pack({"x": entry(dtype="\x1b[2J")}, AB), ["'\\x1b[2J'"]),
    "shape is a number": (pack({"x": entry(2)}, AB), ["shape 2,", *SHAPE]),
    "shape is text": (pack({"x": entry("2")}, AB), SHAPE),
    "shape negative": (pack({"x": entry([-2, -1])}, AB), ["[-2, -1]", *SHAPE]),
    "shape fractional": (pack({"x": entry([2.0])}, AB), ["[2.0]", *SHAPE]),
    "shape true": (pack({"x": entry([True, 2])}, AB), ["[True, 2]", *SHAPE]),
    "shape NaN": (pack({"x": entry([float("nan")])}, AB), ["[nan]", *SHAPE]),
    "shape infinite": (pack({"x": entry([float("inf")])}, AB), ["[inf]", *SHAPE]),
    "shape minus zero": (pack(raw_entry(b'"shape":[-0]').replace(b",2]", b",0]")), SHAPE),
    "shape 2**64": (pack({"x": entry([0, 2**64], [0, 0])}), SHAPE),
    "shape of 5,000 digits": (pack(raw_entry(b'"shape":[' + b"9" * 5_000 + b"]"), AB), SHAPE),
    "shape that wraps around": (pack({"x": entry([2**63 + 1, 2])}, AB), SHAPE),
    "shape huge, then zero": (pack({"x": entry([2**63, 2, 0], [0, 0])}), SHAPE),
    "shape of a million sizes": (pack({"x": entry([2**62] * 1_000_000)}, AB), SHAPE),
    "offsets three": (pack({"x": entry(offsets=[0, 2, 3])}, AB), ["[0, 2, 3]", *OFFSETS]),
    "offsets one": (pack({"x": entry(offsets=[0])}, AB), ["[0]", *OFFSETS]),
    "offsets an object": (pack({"x": entry(offsets={"0": 2})}, AB), OFFSETS),
    "offsets negative": (pack({"x": entry(offsets=[-2, 0])}, AB), ["[-2, 0]", *OFFSETS]),
    "offsets reversed": (pack({"x": entry(offsets=[2, 0])}, AB), ["[2, 0]", *OFFSETS]),
    "offsets fractional": (pack({"x": entry(offsets=[0.0, 2])}, AB), ["[0.0, 2]", *OFFSETS]),
    "offsets true": (pack({"x": entry([1], [False, True])}, b"a"), ["[False, True]", *OFFSETS]),
    "offsets beyond 64 bits": (pack({"x": entry(offsets=[0, 10**30])}, AB), OFFSETS),
    "offsets past the end": (pack({"x": entry([3], [0, 3])}, AB), ["promises", "incomplete"]),
    "offsets far past the end": (
        pack({"x": entry([2**62], [0, 2**62])}, AB),
        ["promises 4,611,686,018,427,38", "incomplete"],
    ),
    "size too small": (pack({"x": entry([1])}, AB), ["x in", "take 1 bytes", "span 2", "again"]),
    "size of the type": (pack({"x": entry(dtype="F32")}, AB), ["type F32", "take 8", "span 2"]),
    "does not start at 0": (
        pack({"x": entry(offsets=[1, 3])}, b"abc"),
        ["x in", "at 1, expected 0, so it leaves a", "gap after the header", "again"],
    ),
    "gap": (pack({"x": entry(), "y": entry(offsets=[3, 5])}, b"abcde"), ["y in", "gap after x"]),
    "overlap": (pack({"x": entry(), "y": entry(offsets=[1, 3])}, b"abc"), ["y in", "overlaps x"]),
    "the same bytes twice": (pack({"x": entry(), "y": entry()}, AB), ["y in", "overlaps x"]),
    "empty inside another": (
        pack({"x": entry(), "y": entry([0], [1, 1])}, AB),
        ["y in", "overlaps x"],
    ),
    "bytes that nobody owns": (pack({"x": entry()}, b"abc"), ["no tensor owns the rest"]),
    "bytes without tensors": (pack({}, AB), ["no tensor owns the rest"]),
    "name with half a character": (pack({"a\ud800": entry()}, AB), NAME),
}

# What safetensors opens all the same; a comment beside the code says why it is refused here.
REFUSED_HERE_ALONE = {
    "name empty": (pack({"": entry()}, AB), ["''", "0 characters", *NAME]),
    "name with zero": (pack({"a\0b": entry()}, AB), ["'a\\x00b'", *NAME]),
    "name with line break": (pack({"a\nb": entry()}, AB), ["'a\\nb'", *NAME]),
    "name acts on the terminal": (pack({"\x1b[2Ja": entry()}, AB), ["'\\x1b[2Ja'", *NAME]),
    "name turns the text around": (pack({"a\u202eb": entry()}, AB), ["'a\\u202eb'", *NAME]),
    "name too long": (pack({"a" * 1_001: entry()}, AB), ["1,001 characters", *NAME]),
    "name twice, alike": (pack(raw_entry()[:-1] + b"," + raw_entry()[1:], AB), ["'x' twice"]),
    "metadata key twice": (pack(b'{"__metadata__":{"a":"b","a":"c"}}'), ["'a' twice"]),
    "field unknown": (pack({"x": entry(strides=[1])}, AB), ["'strides'", *FIELDS]),
    "entry is a list": (pack({"x": ["U8", [2], [0, 2]]}, AB), ["['U8', [2], [0, 2]]", *FIELDS]),
    "type as an object": (pack({"x": entry(dtype={"U8": None})}, AB), ["{'U8': None}"]),
    "shape empty and huge": (pack({"x": entry([0, 2**40, 2**40], [0, 0])}), SHAPE),
    "shape empty and 2**63": (pack({"x": entry([0, 2**63], [0, 0])}), SHAPE),
}

LEGAL = {
    "no tensors": pack({}),
    "metadata null": pack({"__metadata__": None}),
    "metadata": pack({"__metadata__": {"": "\0"}, "x": entry()}, AB),
    "spaces around": pack(b" \n" + raw_entry() + b"\t\r ", AB),
    "scalar": pack({"x": entry([], [0, 1])}, b"a"),
    "empty tensor": pack({"x": entry([0], [0, 0])}),
    "empty tensor between": pack(
        {"z": entry(offsets=[2, 4]), "y": entry([3, 0], [2, 2], "F32"), "x": entry()}, b"abcd"
    ),
    "largest empty tensor": pack({"x": entry([0, 2**63 - 1], [0, 0], "F64")}),
    "another order": pack({"y": entry(offsets=[2, 4]), "x": entry()}, b"abcd"),
    "not aligned": pack({"x": entry([1], [0, 1]), "y": entry([1], [1, 9], "F64")}, b"abcdefghi"),
    "many dimensions": pack({"x": entry([1] * 500 + [2])}, AB),
    "name that is long": pack({"a" * 1_000: entry()}, AB),
    "name in other letters": pack({"层.重量 é": entry()}, AB),
    "name escaped": pack(b'{"\\ud83d\\ude00":' + json.dumps(entry()).encode() + b"}", AB),
    "bool that is neither": pack({"x": entry(dtype="BOOL")}, b"\7\2"),
}


@pytest.mark.parametrize(("file", "words"), REFUSED.values(), ids=REFUSED)
def test_header_refused_by_both(tmp_path: Path, file: bytes, words: list[str]) -> None:
    (tmp_path / SINGLE).write_bytes(file)
    assert oracle(tmp_path / SINGLE) is None
    refuses(tmp_path, SINGLE, *words)


@pytest.mark.parametrize(
    ("file", "words"), REFUSED_HERE_ALONE.values(), ids=REFUSED_HERE_ALONE.keys()
)
def test_header_refused_here_alone(tmp_path: Path, file: bytes, words: list[str]) -> None:
    (tmp_path / SINGLE).write_bytes(file)
    assert oracle(tmp_path / SINGLE) is not None
    refuses(tmp_path, SINGLE, *words)


@pytest.mark.parametrize("file", LEGAL.values(), ids=LEGAL.keys())
def test_header_that_is_legal(tmp_path: Path, file: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(file)
    assert compare(tmp_path) == "opened"


def test_header_as_large_as_allowed(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(pack(b"{}".ljust(100_000_000)))
    assert compare(tmp_path) == "opened"


def test_header_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / SINGLE).open("wb") as stream:
        stream.write((10**12).to_bytes(8, "little"))
        stream.truncate(2 * 10**12)  # takes no room
    refuses(tmp_path, SINGLE, "1,000,000,000,000 bytes", "100,000,000")


# -- headers by the thousand -------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["U8", "F32", "dtype", "shape", "data_offsets", 2**63, 2**64, -1]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=5), inner)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(["x", "y", "z", "__metadata__"]) | st.text(st.characters(), max_size=4)
SIZES = {"U8": 1, "BOOL": 1, "BF16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1}


@st.composite
def nearly_valid(draw: st.DrawFn) -> bytes:
    """A file that is right but for what is drawn to be wrong with it."""
    header: dict[str, Any] = {}
    end = 0
    names = draw(st.lists(KEYS, unique=True, max_size=4))
    for name in names:
        dtype = draw(st.sampled_from([*SIZES]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        start, end = end, end + SIZES[dtype] * torch.Size(shape).numel()
        header[name] = entry(shape, [start, end], dtype)
        if draw(st.integers(0, 5)) == 0:
            header[name][draw(st.sampled_from(["dtype", "shape", "data_offsets", "a"]))] = draw(
                JSON
            )
        if draw(st.integers(0, 9)) == 0:
            header[name]["data_offsets"] = [start + draw(st.integers(-1, 1)), end]
        if draw(st.integers(0, 9)) == 0:
            header[name] = draw(JSON)
    size = max(0, end + draw(st.sampled_from([0] * 8 + [-1, 1])))
    return pack(
        {name: header[name] for name in draw(st.permutations(names))},
        bytes(n % 256 for n in range(size)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(header=st.dictionaries(KEYS, JSON, max_size=3) | JSON, data=st.binary(max_size=4))
def test_arbitrary_headers(folder: Path, header: object, data: bytes) -> None:
    (folder / SINGLE).write_bytes(pack(header, data))
    compare(folder)


@settings(max_examples=500, derandomize=True, deadline=None, database=None)
@given(file=nearly_valid())
def test_nearly_valid_headers(folder: Path, file: bytes) -> None:
    (folder / SINGLE).write_bytes(file)
    compare(folder)


NUMBERS = [
    *(b"0", b"1", b"2", b"3", b"4", b"5", b"7", b"8", b"16", b"-1", b"-0", b"00", b"1.0", b"2e0"),
    *(b"1e999", b"NaN", b"Infinity", b"true", b"null", b'"1"', b"[]", b"{}", b"9" * 5_000),
    *(str(2**power + more).encode() for power in (32, 63, 64) for more in (-1, 0)),
]
TOKEN = re.compile(rb'"[^"]*"|[0-9]+|[\[\]{}:,]')


class Mutator:
    """Derives broken files from a valid one, the same ones each time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.file = save(
            {
                "a.weight": torch.arange(6.0).reshape(2, 3),
                "a.bias": torch.ones(3, dtype=torch.bfloat16),
                "b.weight": torch.arange(64, dtype=torch.int64),
                "empty": torch.ones(0, 2),
                "one": torch.tensor(True),
            },
            {"format": "pt"},
        )
        self.kinds = [self.flip, self.cut, self.splice, self.drop, self.number, self.token]
        self.kinds += [self.length, self.append, self.shift, self.text]

    def __call__(self, position: int) -> bytes:
        file = self.kinds[position % len(self.kinds)](self.file)
        while self.random.random() < 0.3:
            file = self.random.choice(self.kinds)(file)
        return file

    def _at(self, file: bytes) -> int:
        return self.random.randrange(max(1, len(file)))

    def _header(self, file: bytes, change: Any) -> bytes:
        """Change the header, and its length to match."""
        end = min(len(file), 8 + int.from_bytes(file[:8], "little"))
        return pack(change(file[8:end]), file[end:])

    def flip(self, file: bytes) -> bytes:
        changed = bytearray(file)
        for _ in range(self.random.randint(1, 3) if file else 0):
            changed[self._at(file)] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def cut(self, file: bytes) -> bytes:
        return file[: self._at(file)]

    def splice(self, file: bytes) -> bytes:
        start, to = self._at(file), self._at(file)
        return file[:to] + file[start : start + self.random.randint(1, 40)] + file[to:]

    def drop(self, file: bytes) -> bytes:
        start = self._at(file)
        return file[:start] + file[start + self.random.randint(1, 40) :]

    def number(self, file: bytes) -> bytes:
        return self._replace(file, re.compile(rb'\d+|"pt"'), NUMBERS)

    def text(self, file: bytes) -> bytes:
        return self._replace(file, re.compile(rb'"[^"]*"'), [b'""', rb'"\n"', b'"one"', b'"F16"'])

    def shift(self, file: bytes) -> bytes:
        """Move a tensor: its size stays right, and its place does not."""
        by = self.random.choice([-8, -1, 1, 8])

        def moved(match: re.Match[bytes]) -> bytes:
            chosen = by if self.random.random() < 0.3 else 0
            return b"[%d,%d]" % tuple(max(0, int(n) + chosen) for n in match.groups())

        return self._header(
            file, lambda raw: re.sub(rb"\[(\d{1,19}),(\d{1,19})\](?=})", moved, raw)
        )

    def token(self, file: bytes) -> bytes:
        return self._replace(file, TOKEN, TOKEN.findall(file))

    def _replace(self, file: bytes, pattern: re.Pattern[bytes], by: list[bytes]) -> bytes:
        def change(header: bytes) -> bytes:
            found = [*pattern.finditer(header)]
            if not found or not by:
                return header
            start, end = self.random.choice(found).span()
            return header[:start] + self.random.choice(by) + header[end:]

        return self._header(file, change)

    def length(self, file: bytes) -> bytes:
        length = int.from_bytes(file[:8], "little") + self.random.choice([-8, -1, 1, 8, 10**8])
        return (length % 2**64).to_bytes(8, "little") + file[8:]

    def append(self, file: bytes) -> bytes:
        return file + self.random.randbytes(self.random.randint(1, 9))


REASONS = [
    *("opened", "too few", "the format allows", "header alone takes", "not a safetensors file"),
    *(
        " twice",
        ", expected dtype, shape",
        "has type",
        "has shape",
        "data_offsets",
        "take",
        "overlaps",
    ),
    *("leaves a gap", "incomplete", "owns the rest", "text to text", "names a tensor"),
]


def test_mutated_files(folder: Path) -> None:
    mutate = Mutator(5)
    outcomes: Counter[str] = Counter()
    files = {mutate(position) for position in range(4_500)}
    assert len(files) > 3_000
    for file in sorted(files):
        (folder / SINGLE).write_bytes(file)
        outcome = compare(folder)
        outcomes.update(reason for reason in REASONS if reason in outcome)
    assert [reason for reason in REASONS if not outcomes[reason]] == []
    assert outcomes["opened"] > 100
    assert [path.name for path in folder.iterdir()] == [SINGLE]


# -- the index ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """model/one.safetensors with x, and beside it what a stranger must not get at."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"x": torch.arange(4.0)}, folder / "one.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"x": "one.safetensors"}}')
    (tmp_path / "secret").write_text("private key")
    return folder


PLACE = {
    "number": ("3", ["places x in 3", "not the name of a file"]),
    "list": ('["one.safetensors"]', ["places x in ['one", "not the name of a file"]),
    "zero": (r'"a\u0000.safetensors"', [r"'a\x00.safetensors'", "not the name of a file"]),
    "too long": ('"%s.safetensors"' % ("é" * 200), ["not the name of a file"]),
    "empty": ('""', ["places x in ''", "not a *.safetensors"]),
    "pickle": ('"pytorch_model.bin"', ["'pytorch_model.bin'", "not a *.safetensors", "convert"]),
    "text": ('"config.json"', ["'config.json'", "not a *.safetensors"]),
    "outside": ('"../one.safetensors"', ["outside the folder", "who made it"]),
    "inside a file": ('"one.safetensors/x.safetensors"', ["x.safetensors cannot be read"]),
    "missing": ('"two.safetensors"', ["names two.safetensors", "not there", "incomplete"]),
}


@pytest.mark.parametrize(("place", "words"), PLACE.values(), ids=PLACE.keys())
def test_place_in_the_index(checkpoint: Path, place: str, words: list[str]) -> None:
    (checkpoint / INDEX).write_text(f'{{"weight_map": {{"x": {place}}}}}')
    refuses(checkpoint, *words)


INDICES = {
    "tensor twice": (b'{"weight_map":{"x":"one.safetensors","x":"two.safetensors"}}', "'x' twice"),
    "map twice": (b'{"weight_map":{},"weight_map":{"x":"one.safetensors"}}', "'weight_map' twice"),
    "not UTF-8": (b'{"weight_map":{"\xff":"one.safetensors"}}', "utf-8"),
    "nested": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "list": (b'["x"]', "weight_map is ['x']"),
    "no tensors": (b'{"weight_map":{}}', "weight_map is {}"),
}


@pytest.mark.parametrize(("text", "word"), INDICES.values(), ids=INDICES.keys())
def test_index_refused(checkpoint: Path, text: bytes, word: str) -> None:
    (checkpoint / INDEX).write_bytes(text)
    refuses(checkpoint, INDEX, word, "not an index", "download it again")


def test_index_with_a_name_that_cannot_be_printed(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_text(r'{"weight_map":{"\u001b[2J":"one.safetensors"}}')
    refuses(checkpoint, INDEX, r"'\x1b[2J'", *NAME)


def test_index_of_absurd_size_is_not_read(checkpoint: Path) -> None:
    os.truncate(checkpoint / INDEX, 10**12)
    refuses(checkpoint, INDEX, "1,000,000,000,000 bytes", "more than 100,000,000")


def test_index_may_say_more_and_write_a_name_in_two_ways(checkpoint: Path) -> None:
    save_file({"x": torch.ones(1), "y": torch.ones(1)}, checkpoint / "one.safetensors")
    places = '{"x": "one.safetensors", "y": "./one.safetensors"}'
    total = "9" * 5_000
    text = f'{{"metadata": {{"total_size": {total}, "a": NaN}}, "weight_map": {places}}}'
    (checkpoint / INDEX).write_text(text)
    assert Shards(checkpoint).names() == ["x", "y"]


def test_mutated_indices(checkpoint: Path) -> None:
    mutate = Mutator(6)
    mutate.file = pack((checkpoint / INDEX).read_bytes())
    outcomes: Counter[bool] = Counter()
    for position in range(800):
        (checkpoint / INDEX).write_bytes(mutate(position)[8:])
        try:
            with no_hang():
                outcomes[Shards(checkpoint).names() == ["x"]] += 1
        except CheckpointError:
            outcomes[False] += 1
    assert outcomes[True] > 50 and outcomes[False] > 100


# -- links, pipes, devices ---------------------------------------------------------------------


def make(kind: str, path: Path) -> None:
    """Put something at `path` that is no file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(path.parent.parent / "pipe")
        path.symlink_to("../pipe")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "../nowhere", "up": ".."}[kind])


NO_FILE = {
    "folder": ["not a file but a folder"],
    "pipe": ["not a file but", "a pipe"],
    "link to a pipe": ["not a file but", "a pipe"],
    "device": ["not a file but", "a device"],
    "up": ["not a file but a folder"],
    "dangling": ["is a link to ../nowhere", "not there", "run it again"],
    "loop": ["leads back to itself", "download"],
}


@pytest.mark.parametrize("kind", NO_FILE)
@pytest.mark.parametrize("name", ["one.safetensors", INDEX])
@pytest.mark.parametrize("indexed", [True, False])
def test_shard_or_index_that_is_no_file(
    checkpoint: Path, kind: str, name: str, indexed: bool
) -> None:
    (checkpoint / name).unlink()
    make(kind, checkpoint / name)
    if not indexed and name != INDEX:
        (checkpoint / INDEX).unlink()
    refuses(checkpoint, str(checkpoint / name), *NO_FILE[kind])


def test_shard_may_be_a_link(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "one.safetensors").rename(tmp_path / "elsewhere")
    (checkpoint / "one.safetensors").symlink_to("../elsewhere")
    with Shards(checkpoint) as shards:
        assert shards.read("x").tolist() == [0, 1, 2, 3]


OTHER = {
    "pipe": ["a pipe, a socket or a device", "remove it"],
    "link to a pipe": ["is a link to", "outside the checkpoint"],
    "device": ["is a link to /dev/zero", "outside the checkpoint"],
    "up": ["is a link to", "outside the checkpoint"],
    "dangling": ["is a link to ../nowhere", "not there"],
    "loop": ["leads back to itself"],
}


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("name", ["tokenizer.json", "sub/vocab.txt"])
def test_other_file_that_is_no_file(checkpoint: Path, kind: str, name: str) -> None:
    (checkpoint / "sub").mkdir()
    if kind == "up" and name.startswith("sub"):
        (checkpoint / name).symlink_to("../..")
    elif kind == "link to a pipe":
        os.mkfifo(checkpoint.parent / "pipe")
        (checkpoint / name).symlink_to(checkpoint.parent / "pipe")
    else:
        make(kind, checkpoint / name)
    refuses(checkpoint, str(checkpoint / name), *OTHER[kind])


@pytest.mark.parametrize("way", ["relative", "absolute", "by another link", "hidden"])
def test_link_that_would_copy_a_secret(checkpoint: Path, tmp_path: Path, way: str) -> None:
    name = ".hidden" if way == "hidden" else "tokenizer.json"
    target = tmp_path / "secret" if way == "absolute" else Path("../secret")
    if way == "by another link":
        (checkpoint / "step.bin").symlink_to(target)  # not copied itself
        target = Path("step.bin")
    (checkpoint / name).symlink_to(target)
    refuses(checkpoint, str(checkpoint / name), str(tmp_path / "secret"), "would be copied")


def test_link_made_after_opening_is_not_copied_either(checkpoint: Path, tmp_path: Path) -> None:
    with Shards(checkpoint) as shards:
        (checkpoint / "tokenizer.json").symlink_to("../secret")
        with (
            pytest.raises(CheckpointError, match="would be copied"),
            CheckpointWriter(tmp_path / "out") as writer,
        ):
            writer.carry(shards)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "secret"]


def test_links_that_stay_inside(checkpoint: Path) -> None:
    """Those to folders are not followed, or the loops would not end."""
    (checkpoint / "sub" / "deep").mkdir(parents=True)
    (checkpoint / "sub" / "vocab.txt").write_text("x")
    (checkpoint / "vocab.txt").symlink_to("sub/vocab.txt")
    (checkpoint / "sub" / "deep" / "loop").symlink_to("../..")
    (checkpoint / "same").symlink_to(checkpoint / "sub")
    (checkpoint / "again.safetensors.d").symlink_to(".")
    with no_hang():
        found = Shards(checkpoint).other_files()
    assert [str(path) for path in found] == ["sub/vocab.txt", "vocab.txt"]


def test_folder_that_is_itself_a_link(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "a.txt").write_text("x")
    (checkpoint / "b.txt").symlink_to("a.txt")
    (tmp_path / "link").symlink_to("model")
    assert Shards(tmp_path / "link").other_files() == [Path("a.txt"), Path("b.txt")]


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A snapshot in the hub's cache, with config.json still to be made."""
    repo = tmp_path / "hub" / "models--a--b"
    snapshot = repo / "snapshots" / "c0ffee"
    (snapshot / "sub").mkdir(parents=True)
    (repo / "blobs").mkdir()
    save_file({"x": torch.ones(1)}, repo / "blobs" / "1f")
    (repo / "blobs" / "2e").write_text("{}")
    (snapshot / SINGLE).symlink_to("../../blobs/1f")
    (tmp_path / "hub" / "secret").write_text("private key")
    return snapshot


def test_hub_cache(cached: Path) -> None:
    (cached / "config.json").symlink_to("../../blobs/2e")
    (cached / "sub" / "config.json").symlink_to("../../../blobs/2e")
    assert [str(p) for p in Shards(cached).other_files()] == ["config.json", "sub/config.json"]
    (cached / "sub" / SINGLE).symlink_to("../../../blobs/1f")
    assert [str(p) for p in Shards(cached / "sub").other_files()] == ["config.json"]


def test_hub_cache_with_a_shared_store(cached: Path) -> None:
    """Since version 2 a blob may be a link to one that all cached models share."""
    hub = cached.parents[2]
    (hub / "blobs" / "ab").mkdir(parents=True)
    (hub / "blobs" / "ab" / ("ab" * 32)).write_text("{}")
    (cached / "../../blobs/3d").symlink_to("../../blobs/ab/" + "ab" * 32)
    (cached / "config.json").symlink_to("../../blobs/3d")
    assert Shards(cached).other_files() == [Path("config.json")]
    (hub / "blobs" / "passwords").write_text("x")
    (cached / "tokenizer.json").symlink_to("../../../blobs/passwords")
    refuses(cached, "tokenizer.json is a link to", "passwords", "would be copied")


@pytest.mark.parametrize("trick", ["blob is a link", "blobs is a link", "of another", "up"])
def test_hub_cache_that_leads_elsewhere(cached: Path, trick: str) -> None:
    repo, hub = cached.parents[1], cached.parents[2]
    target = "../../blobs/secret"
    if trick == "blob is a link":
        (repo / "blobs" / "secret").symlink_to(hub / "secret")
    elif trick == "blobs is a link":
        (repo / "blobs").rename(repo / "kept")
        (repo / "blobs").symlink_to(hub)
        (cached / SINGLE).unlink()
        (cached / SINGLE).symlink_to("../../kept/1f")
    elif trick == "of another":
        (hub / "models--c--d" / "blobs").mkdir(parents=True)
        (hub / "models--c--d" / "blobs" / "secret").write_text("private")
        target = "../../../models--c--d/blobs/secret"
    else:
        target = "../../blobs/../../secret"
    (cached / "config.json").symlink_to(target)
    refuses(cached, "config.json is a link to", "secret", "would be copied")


def test_folders_deeper_than_calls(checkpoint: Path) -> None:
    """More folders in each other than Python can call functions, for as long as the test reads."""
    depth = len(inspect.stack())
    Path(checkpoint, *["d"] * 200).mkdir(parents=True)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 100)
    try:
        with no_hang():
            assert Shards(checkpoint).other_files() == []
    finally:
        sys.setrecursionlimit(before)


# -- files that the system does not give out ---------------------------------------------------


def fail(number: int, only: str = "") -> Any:
    """A stand-in for a function of `os` that fails, on paths that hold `only`."""

    def failing(path: object, *args: object, **kwargs: object) -> Any:
        if only in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    original = os.open
    return failing


def test_shard_that_may_not_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", fail(errno.EACCES, "one.safetensors"))
    refuses(checkpoint, "one.safetensors", "Permission denied", "change its permissions")


def test_disk_that_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(checkpoint)
    monkeypatch.setattr(os, "open", fail(errno.EIO, "one.safetensors"))
    with pytest.raises(CheckpointError, match=r"one\.safetensors .*Input/output.* check the disk"):
        shards.read("x")
    refuses(checkpoint, "one.safetensors", "Input/output error", "check the disk")
    monkeypatch.undo()
    monkeypatch.setattr(os, "preadv", fail(errno.EIO))
    with pytest.raises(CheckpointError, match=r"one\.safetensors .*Input/output.* check the disk"):
        shards.read("x")
    shards.close()


@pytest.mark.parametrize("name", ["one.safetensors", INDEX])
def test_disk_that_fails_within_a_header(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Opening succeeds, and reading does not."""

    def fdopen(handle: int, mode: str) -> Any:
        stream = original(handle, mode)
        if Path(f"/proc/self/fd/{handle}").readlink().name == name:
            stream.close()
            stream = Failing(handle_of(checkpoint / name))
        return stream

    class Failing:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def fileno(self) -> int:
            return self.handle

        def read(self, size: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *exc: object) -> None:
            os.close(self.handle)

    def handle_of(path: Path) -> int:
        return os.open(path, os.O_RDONLY)

    original = os.fdopen
    monkeypatch.setattr(os, "fdopen", fdopen)
    refuses(checkpoint, str(checkpoint / name), "Input/output error", "check the disk")


@pytest.mark.parametrize("name", ["model", "model/sub", "model/tokenizer.json"])
def test_what_may_not_be_listed_or_copied(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = checkpoint.parent / name
    (checkpoint / "sub").mkdir()
    (checkpoint / "tokenizer.json").write_text("{}")
    iterdir, access = Path.iterdir, os.access

    def no_iterdir(folder: Path) -> Iterator[Path]:
        if folder == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", no_iterdir)
    monkeypatch.setattr(os, "access", lambda file, mode: file != path and access(file, mode))
    refuses(checkpoint, f"{path} cannot be read", "change its permissions")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [".", "one.safetensors", INDEX, "tokenizer.json", "sub"])
@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_permissions(checkpoint: Path, name: str, mode: int) -> None:
    (checkpoint / "sub").mkdir()
    (checkpoint / "sub" / "a.txt").write_text("x")
    (checkpoint / "tokenizer.json").write_text("{}")
    path = checkpoint / name
    if path.is_file():
        mode = 0
    path.chmod(mode)
    try:
        refuses(checkpoint, "cannot be read", "change its permissions")
    finally:
        path.chmod(0o700)


def test_more_than_the_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", empty)
    with Shards(checkpoint) as shards, pytest.raises(CheckpointError, match=r"x in .* 16 bytes"):
        shards.read("x")


# -- files that change -------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("change", ["cut", "longer", "same size"])
def test_shard_that_changes(checkpoint: Path, opened: bool, change: str) -> None:
    path = checkpoint / "one.safetensors"
    with Shards(checkpoint) as shards, Shards(checkpoint) as same:
        if opened:
            shards.read("x")
        size = path.stat().st_size
        os.truncate(path, size + {"cut": -8, "longer": 8, "same size": 0}[change])
        os.utime(path, (1, 1) if change == "same size" else None)
        for act in (lambda: shards.read("x"), lambda: shards.equal("x", same)):
            with pytest.raises(CheckpointError, match=r"one\.safetensors was changed.*start again"):
                act()


def test_shard_that_is_cut_within_a_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Shards(checkpoint) as shards:
        lengths = itertools.chain([3], itertools.repeat(0))
        monkeypatch.setattr(os, "preadv", lambda *_: next(lengths))
        with no_hang(), pytest.raises(CheckpointError, match="ends before x; it was cut short"):
            shards.read("x")


def test_shard_that_is_replaced_by_a_pipe(checkpoint: Path) -> None:
    path = checkpoint / "one.safetensors"
    with Shards(checkpoint) as shards:
        path.unlink()
        with pytest.raises(CheckpointError, match="is not there"):
            shards.read("x")
        os.mkfifo(path)
        with no_hang(), pytest.raises(CheckpointError, match="not a file but"):
            shards.read("x")


def test_pipe_that_passed_for_a_file(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the file's place between the look at its kind and the opening."""
    path = checkpoint / "one.safetensors"
    before, look = path.stat(), Path.stat
    path.unlink()
    os.mkfifo(path)

    def stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = look(self, follow_symlinks=follow_symlinks)
        return before if self == path and follow_symlinks else found

    monkeypatch.setattr(Path, "stat", stat)
    refuses(checkpoint, "one.safetensors", "0 bytes", "too few")


def test_equal_compares_all_bytes(checkpoint: Path, tmp_path: Path) -> None:
    values = torch.arange(3 << 20, dtype=torch.int32)  # three pieces
    for name, last in (("p", 0), ("q", 0), ("r", 1)):
        (tmp_path / name).mkdir()
        values[-1] = last
        save_file({"x": values}, tmp_path / name / SINGLE)
    p, q, r = (Shards(tmp_path / name) for name in "pqr")
    assert p.equal("x", q) and not p.equal("x", r) and not p.equal("x", Shards(checkpoint))
