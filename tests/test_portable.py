"""Where only Linux has a call, the package has another way: macOS on arm64 stays possible."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from steelyard.file_lock import lock_file

SOURCE = Path(__file__).parents[1] / "src" / "steelyard"

ELSEWHERE = """
import importlib, mmap, os, pkgutil, sys
import compressed_tensors, datasets, transformers  # which may use what they like
from transformers import PreTrainedModel

for name in ("fcntl", "resource"):
    sys.modules[name] = None  # makes the import an ImportError
for owner, name in [
    (os, "posix_fadvise"), (os, "sched_getaffinity"), (os, "copy_file_range"),
    (mmap, "MADV_HUGEPAGE"),
]:
    if hasattr(owner, name):
        delattr(owner, name)

import steelyard
for found in pkgutil.walk_packages(steelyard.__path__, "steelyard."):
    if not found.name.endswith(("__main__", "._native")):
        importlib.import_module(found.name)

from steelyard.demo import model_folder
recipe = {"QuantizationModifier": {"scheme": "W4A16"}}
steelyard.oneshot(str(model_folder()), recipe, output_dir=sys.argv[1], show_progress=False)
"""


def test_imports_and_quantizes_without_calls_that_only_linux_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("system", ["with fcntl", "without fcntl"])
def test_a_lock_holds_against_another_process(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "without fcntl":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    path = tmp_path / "lock"
    path.touch()
    parent = psutil.Process().ppid()  # lives as long as this test
    with path.open() as mine, path.open() as other:
        lock_file(mine.fileno(), holder=None)
        with pytest.raises(BlockingIOError):
            lock_file(other.fileno(), holder=parent)
    with path.open() as later:
        lock_file(later.fileno(), holder=os.getpid())


def test_a_process_that_has_ended_holds_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    path = tmp_path / "lock"
    path.touch()
    with path.open() as file:
        lock_file(file.fileno(), holder=ended.pid)


@pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang")
@pytest.mark.parametrize("build", ["baseline", "avx2", "avx512"])
def test_kernels_compile_for_arm64(build: str, tmp_path: Path) -> None:
    told = subprocess.run(
        ["clang++", "-E", "-v", "-x", "c++", os.devnull], capture_output=True, text=True, check=True
    ).stderr
    listed = told.split("search starts here:")[-1].split("End of search list")[0]
    folders = [folder for folder in re.findall(r"^ (\S+)$", listed, re.M) if "clang" not in folder]
    stub = tmp_path / "gnu" / "stubs-32.h"  # glibc's headers for x86 take any other target for it
    stub.parent.mkdir()
    stub.touch()
    command: list[str | Path] = ["clang++", "--target=aarch64-linux-gnu", "-std=c++17"]
    command += ["-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    for folder in (tmp_path, *folders):
        command += ["-isystem", folder]
    command.append(SOURCE / "kernels" / "native" / f"isa_{build}.cpp")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
