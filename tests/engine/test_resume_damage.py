"""What an unfinished run left on the disk, damaged: a resumed run notices, or ends with its bytes.

A journal is damaged in every way that one value, one byte or one cut can be. The files that it
names are deleted, cut off and changed. The source and the processor are exchanged meanwhile.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import small_model, token_batches
from interruption import Stop, lasting, small_steps, stop_at_mark

from steelyard import kernels, oneshot
from steelyard.checkpoint.journal import journal_text, read_journal
from steelyard.checkpoint.provenance import sampled_digest
from steelyard.engine.mark import Mark
from steelyard.errors import CheckpointError
from steelyard.modifiers import IMatrixGatherer, QuantizationModifier

KINDS = ("stream", "layers")
STATIC = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel", "observer": "imatrix_mse"},
    "input_activations": {"num_bits": 8, "strategy": "tensor"},
}


def run(source: Path, folder: Path, kind: str) -> Any:
    """Quantize to folder/out, with a mark after every step; save all that a run can save."""
    folder.mkdir(exist_ok=True)
    if kind == "stream":
        plain = QuantizationModifier(scheme="NVFP4A16", ignore=["lm_head"])
        with small_steps():
            return oneshot(source, plain, None, folder / "out")
    recipe = [
        IMatrixGatherer(ignore=["lm_head"], save_to="importance.safetensors"),
        QuantizationModifier(config_groups={"group_0": STATIC}, ignore=["lm_head"]),
    ]
    kept = folder / "statistics.safetensors"
    with small_steps():
        return oneshot(source, recipe, token_batches(), folder / "out", save_statistics=kept)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where importance is saved


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "source"
    small_model("llama", num_hidden_layers=3).save_pretrained(folder, max_shard_size="200KB")
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(file.relative_to(folder)): hashlib.sha256(lasting(file)).hexdigest() for file in files
    }


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each kind of run ends with, and where it was stopped."""
    found = {}
    for kind in KINDS:
        base = tmp_path_factory.mktemp(kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(base)
            run(source, base / "whole", kind)
            stop_at_mark(patch, 2)
            with pytest.raises(Stop):
                run(source, base / "stopped", kind)
        found[kind] = (contents(base / "whole"), base / "stopped")
    return found


@pytest.fixture
def stopped(undisturbed: dict[str, Any], tmp_path: Path) -> Callable[[str], Path]:
    """Make a copy of what the stopped run left; return its folder."""

    def make(kind: str, name: str = "again") -> Path:
        shutil.copytree(undisturbed[kind][1], tmp_path / name, symlinks=True)
        return tmp_path / name

    return make


def work(folder: Path) -> Path:
    return folder / ".out.steelyard"


def ends_well(source: Path, folder: Path, kind: str, undisturbed: dict[str, Any]) -> bool:
    """Resume; return whether it ended with the bytes of an undisturbed run, or was refused."""
    try:
        run(source, folder, kind)
    except CheckpointError as error:
        assert "resume=False" in str(error)
        assert not (folder / "out").exists()
        return False
    assert contents(folder) == undisturbed[kind][0]
    return True


# -- the journal --------------------------------------------------------------------------------

Path_ = tuple[Any, ...]
OTHERS: tuple[Any, ...] = (None, True, False, 0, 1, -1, 1.5, 10**30, "", "x", [], {}, [0], {"a": 1})


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the path to every value, those that hold others among them."""
    yield path
    inner: Any = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from leaves(each, (*path, key))


def at(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key]
    return value


def with_(value: Any, path: Path_, new: Any) -> Any:
    """Return a copy in which `new` stands at `path`; Ellipsis removes it."""
    changed = copy.deepcopy(value)
    if not path:
        return new
    parent = at(changed, path[:-1])
    if new is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return changed


def changes(value: Any) -> Iterator[tuple[Path_, Any]]:
    """Yield every value of a journal with all that may stand there instead."""
    for path in leaves(value):
        now = at(value, path)
        if path:
            yield path, ...
        near: tuple[Any, ...] = ()
        if isinstance(now, bool):
            near = (not now,)
        elif isinstance(now, (int, float)):
            near = (now + 1, -now, str(now))
        elif isinstance(now, str):
            near = (now[:-1], now + "x", now.upper())
        elif isinstance(now, list):
            near = (now[:-1], [*now, *now[-1:]], now[::-1])
        for new in (*near, *OTHERS):
            if type(new) is not type(now) or new != now:
                yield path, new


def journal(folder: Path) -> Any:
    return json.loads((work(folder) / "journal.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_value_is_noticed(
    kind: str, stopped: Callable[[str], Path], tmp_path: Path
) -> None:
    """A sample of thousands, in the file as it is read."""
    whole = journal(stopped(kind))
    place, found = tmp_path / "journal.json", list(changes(whole))
    assert len(found) > 900
    for path, new in random.Random(0).sample(found, 500):
        place.write_text(json.dumps(with_(whole, path, new)))
        with pytest.raises(CheckpointError, match=r"journal\.json .*start anew with resume=False"):
            read_journal(place)


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_byte_is_noticed(
    kind: str, stopped: Callable[[str], Path], tmp_path: Path
) -> None:
    raw = (work(stopped(kind)) / "journal.json").read_bytes()
    place = tmp_path / "journal.json"
    place.write_bytes(raw)
    content = read_journal(place)
    chance, refused = random.Random(1), 0
    for number in range(300):
        changed = bytearray(raw)
        where = chance.randrange(len(raw))
        if number % 3 == 0:
            del changed[where:]
        elif number % 3 == 1:
            changed[where] ^= 1 << chance.randrange(8)
        else:
            del changed[where : where + chance.randrange(1, 50)]
        place.write_bytes(changed)
        try:
            same = read_journal(place) == content  # a space more or less changes nothing
        except CheckpointError as error:
            assert "resume=False" in str(error)
            refused += 1
        else:
            assert same
    assert refused > 290


@pytest.mark.parametrize("kind", KINDS)
def test_journal_with_fields_of_other_types(
    kind: str, stopped: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also one whose checksum is right, such as that of a version with other fields."""
    content = journal(stopped(kind))["content"]
    cases: list[tuple[Path_, Any]] = []
    for path in leaves(content):
        if not path or path[0] in ("identity", "progress"):  # of any form, as far as this file goes
            continue
        now = at(content, path)
        for new in (..., None, "x", -1, 1.5, True, [None], {"": None}, {"more": 1}):
            alike = isinstance(new, str) and isinstance(now, str)
            optional = new is ... and len(path) > 1 and path[-1] not in FIELDS
            if not (alike or optional or (isinstance(now, bool) and new is True)):
                cases.append((path, new))
    assert len(cases) > 150
    for path, new in random.Random(3).sample(cases, 150):
        place = tmp_path / "journal.json"
        place.write_text(journal_text(with_(content, path, new)))
        with pytest.raises(CheckpointError, match="was damaged"):
            read_journal(place)


FIELDS = {
    *("names", "nbytes", "header", "header_crc", "crc", "size", "written", "entries", "waiting"),
    *("dtype", "shape", "data_offsets"),
}


def test_mark_with_fields_of_other_types(stopped: Callable[[str], Path]) -> None:
    mark = journal(stopped("layers"))["content"]["progress"][0]
    assert Mark.of(mark).model_dump(mode="json") == mark
    for name in mark:
        for new in (..., None, "x", -1, [None], {"": None}):
            with pytest.raises(CheckpointError, match=f"{name}.*resume=False"):
                Mark.of(with_(mark, (name,), new))
    with pytest.raises(CheckpointError, match=r"progress\.more"):
        Mark.of({**mark, "more": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_runs_resumed_with_a_changed_journal(
    kind: str,
    source: Path,
    stopped: Callable[..., Path],
    undisturbed: dict[str, Any],
) -> None:
    """A sample of all changes, from the command to the files; first those that once went wrong."""
    whole = journal(stopped(kind))
    progress = ("content", "progress", 0)
    known: list[tuple[Path_, Any]] = [
        ((*progress, "calibrated"), True),
        ((*progress, "done"), 1),
        ((*progress, "unseen"), ["x"]),
        (("content", "complete"), True),
    ]
    for number, (path, new) in enumerate(
        [*known, *random.Random(2).sample(list(changes(whole)), 6)]
    ):
        folder = stopped(kind, f"again-{number}")
        (work(folder) / "journal.json").write_text(json.dumps(with_(whole, path, new)))
        assert not ends_well(source, folder, kind, undisturbed), (path, new)


@pytest.mark.parametrize("kind", KINDS)
def test_run_without_its_journal_starts_anew(
    kind: str, source: Path, stopped: Callable[[str], Path], undisturbed: dict[str, Any]
) -> None:
    folder = stopped(kind)
    (work(folder) / "journal.json").unlink()
    assert ends_well(source, folder, kind, undisturbed)


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_run_resumes(
    kind: str, source: Path, stopped: Callable[[str], Path], undisturbed: dict[str, Any]
) -> None:
    folder = stopped(kind)
    names = {path.name for path in work(folder).iterdir()}
    named = {"hidden-0-2.safetensors", "algorithm0-2", "statistics-2"}
    assert (named <= names) == (kind == "layers")
    assert ends_well(source, folder, kind, undisturbed)


# -- the files that it names --------------------------------------------------------------------


def delete(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [delete, cut, empty, flip, lengthen])
@pytest.mark.parametrize("kind", ["hidden", "algorithm0", "statistics"])
def test_damaged_file(
    kind: str,
    damage: Callable[[Path], None],
    source: Path,
    stopped: Callable[[str], Path],
) -> None:
    folder = stopped("layers")
    (path,) = work(folder).glob(f"{kind}-*2*")
    damage(path)
    said = "is missing" if damage is delete else "was changed or cut off"
    with pytest.raises(CheckpointError, match=f"{path.name} {said}.*resume=False"):
        run(source, folder, "layers")


def test_hidden_states_of_another_mark(
    source: Path, stopped: Callable[[str], Path], undisturbed: dict[str, Any]
) -> None:
    """What a rank wrote that did not come to a mark is not taken for what the journal names."""
    folder = stopped("layers")
    (path,) = work(folder).glob("hidden-*2*")
    flipped = path.with_name("hidden-1-2.safetensors")
    shutil.copy(path, flipped)
    flip(flipped)
    assert ends_well(source, folder, "layers", undisturbed)


# -- what the run is made of --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_source_replaced_with_the_same_size_and_time(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "model"
    shutil.copytree(source, other)
    with monkeypatch.context() as patch:
        stop_at_mark(patch, 2)
        with pytest.raises(Stop):
            run(other, tmp_path / "q", kind)
    shard = sorted(other.glob("*.safetensors"))[-1]
    before = shard.stat()
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = shard.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(CheckpointError, match=f"(?s)source: {shard.name} was .*resume=False"):
        run(other, tmp_path / "q", kind)


def test_digest_of_a_large_file(tmp_path: Path) -> None:
    """It reads samples: another content is noticed, at the ends any byte is."""
    size = 20 << 20
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(size))
    first = sampled_digest(path)
    assert sampled_digest(path) == first
    for place in (0, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            old = file.read(1)
            file.seek(place)
            file.write(bytes([old[0] ^ 1]))
        assert sampled_digest(path) != first
        with path.open("r+b") as file:
            file.seek(place)
            file.write(old)
    assert sampled_digest(path) == first
    path.write_bytes(random.Random(1).randbytes(size))
    assert sampled_digest(path) != first


def test_another_processor_kind(
    source: Path,
    stopped: Callable[..., Path],
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of matrices may differ in their last bits; what needs no data does not."""
    sets = kernels.info()["instruction_sets"]
    assert isinstance(sets, list)
    if len(sets) > 1:
        monkeypatch.setenv("STEELYARD_ISA", sets[-1])
    else:
        monkeypatch.setenv("STEELYARD_BACKEND", "reference")
    with pytest.raises(CheckpointError, match=r"(?s)processor: kernels was compiled .*, and is"):
        run(source, stopped("layers", "one"), "layers")
    folder = stopped("stream", "two")
    run(source, folder, "stream")
    naming = ("out/report.html", "out/report.json", "out/provenance.json")  # the kernels
    expected, found = undisturbed["stream"][0], contents(folder)
    assert found.keys() == expected.keys() > set(naming)
    assert {n for n in found if found[n] != expected[n]} <= set(naming)


def test_batches_in_another_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in bf16 is not continued in fp32; in bf16 it ends with the bytes of one that was not
    stopped."""
    model = small_model("llama", num_hidden_layers=3).bfloat16()
    model.save_pretrained(tmp_path / "source")
    monkeypatch.setenv("STEELYARD_FORWARD", "stored")
    run(tmp_path / "source", tmp_path / "whole", "layers")
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_at_mark(patch, 2)
        run(tmp_path / "source", tmp_path / "stopped", "layers")
    with monkeypatch.context() as patch:
        patch.setenv("STEELYARD_FORWARD", "fp32")
        changed = r"batches are computed in was torch.bfloat16, and is torch.float32"
        with pytest.raises(CheckpointError, match=changed):
            run(tmp_path / "source", tmp_path / "stopped", "layers")
    run(tmp_path / "source", tmp_path / "stopped", "layers")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_processor_kind_that_torch_sees() -> None:
    code = "from steelyard.model.processor import processor; print(processor()['torch'])"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() in ("DEFAULT", "NO AVX")
