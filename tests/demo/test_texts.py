"""Texts from the standard library: two parts that never mix, the same on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from steelyard.demo import calibration_texts, held_out_texts
from steelyard.demo.texts import library_files, part_of
from steelyard.errors import DataError

# Written down once: a file that changes sides would let the model be measured on what it learned.
HELD_OUT = ["ast.py", "doctest.py", "email/message.py", "enum.py", "json/scanner.py", "textwrap.py"]
TRAIN = ["argparse.py", "asyncio/events.py", "email/header.py", "json/decoder.py", "typing.py"]


@pytest.mark.parametrize(
    ("name", "part"),
    [*((name, "held_out") for name in HELD_OUT), *((name, "train") for name in TRAIN)],
)
def test_a_file_stays_in_its_part(name: str, part: str) -> None:
    assert part_of(name) == part
    assert name in library_files(part)


def test_parts_are_disjoint_and_of_the_stated_sizes() -> None:
    train, held_out = library_files("train"), library_files("held_out")
    assert not train.keys() & held_out.keys()
    sizes = [sum(path.stat().st_size for path in part.values()) for part in (train, held_out)]
    assert 0.05 < sizes[1] / sum(sizes) < 0.15
    assert list(train) == sorted(train)


def test_only_the_library_itself_is_read(tmp_path: Path) -> None:
    kept = ["json/decoder.py", "argparse.py", "importlib/metadata/_meta.py"]
    left = ["json/tests/a.py", "test/b.py", "site-packages/c.py", "encodings/d.py"]
    left += ["sitecustomize.py", "_sysconfigdata__x86_64.py", "numpy/e.py", "argparse.txt"]
    for name in [*kept, *left]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n", "utf-8")
    found = {
        name: path for part in ("train",) for name, path in library_files(part, tmp_path).items()
    }
    assert sorted(found) == sorted(kept)
    with pytest.raises(DataError, match="no Python files"):  # nor does one hide in the other part
        library_files("held_out", tmp_path)
    assert all(path == tmp_path / name for name, path in found.items())


def test_a_library_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no Python files of the standard library in .*: use a"):
        library_files("train", tmp_path)


@pytest.mark.parametrize(
    ("texts", "part"), [(calibration_texts, "train"), (held_out_texts, "held_out")]
)
def test_texts_are_whole_lines_of_files_of_their_part(texts, part) -> None:
    sources = [path.read_text("utf-8") for path in library_files(part).values()]
    chosen = texts(20, seed=5, characters=600)
    assert len({*chosen}) == 20
    for text in chosen:
        assert 300 <= len(text) <= 600
        assert any(source.startswith(text) or "\n" + text in source for source in sources)


def test_seed_and_count_choose_the_texts() -> None:
    assert held_out_texts(6, seed=1) == held_out_texts(9, seed=1)[:6]
    assert held_out_texts(6, seed=1) != held_out_texts(6, seed=2)


def test_pieces_do_not_overlap() -> None:
    with pytest.raises(DataError, match=r"held_out holds (\d+) texts of 2048") as caught:
        held_out_texts(10**9)
    every = held_out_texts(int(str(caught.value).split("holds ")[1].split()[0]))
    total = sum(len(path.read_text("utf-8")) for path in library_files("held_out").values())
    assert 0.85 * total < sum(map(len, every)) <= total


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_a_count_out_of_range_is_an_error(count: int) -> None:
    with pytest.raises(DataError, match=f"count is {count}, but train holds .* pass 1 to"):
        calibration_texts(count)


def test_root_is_the_running_pythons_library() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    assert library_files("held_out")["enum.py"] == root / "enum.py"
