"""Regular expressions that take years are refused in seconds, and others are not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.checkpoint import patterns
from steelyard.checkpoint.config_file import read_config
from steelyard.checkpoint.patterns import LONGEST, problem_of, slow_pattern
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import CheckpointError

NAMES = [f"model.layers.{i}.self_attn.q_proj" for i in range(40)]
SLOW = ["re:(.+)+x", "re:((.|..)+)+!", "re:.*.*.*.*.*.*.*.*.*x$", "re:" + "(.*|.+)" * 9 + "!"]
QUICK = ["re:.*self_attn.*", "re:.*(q|k|v)_proj$", r"re:model\.layers\.(0|1|2)\..*_proj", "q_proj"]


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.3)


@pytest.mark.parametrize("pattern", SLOW)
def test_slow_expression_is_named_in_time(pattern: str) -> None:
    started = time.process_time()
    problem = slow_pattern([*QUICK, pattern, "re:.*"], NAMES)
    assert problem is not None and pattern[:20] in problem and "40 module names" in problem
    assert time.process_time() - started < 1  # the work was done elsewhere, and ended


def test_usual_expressions_pass() -> None:
    assert slow_pattern(QUICK, NAMES) is None
    assert slow_pattern(QUICK * 100, NAMES * 1000) is None


@pytest.mark.parametrize("pattern", ["re:(", "re:*", "re:" + "(" * 200 + ")" * 200, "re:[z-a]"])
def test_no_expression(pattern: str) -> None:
    problem = problem_of(pattern)
    assert problem is None or "not a regular expression" in problem  # deep nesting may compile
    assert problem is not None or pattern.startswith("re:((")


def test_length_of_an_expression_is_limited() -> None:
    problem = problem_of("re:" + "a" * LONGEST)
    assert problem is not None and len(problem) < 300 and "10,003 characters" in problem


@pytest.mark.parametrize("field", ["ignore", "targets"])
@pytest.mark.parametrize("pattern", ["re:((.+)+)+!", "re:("])
def test_config_of_a_checkpoint(small_model: Callable[..., Any], field: str, pattern: str) -> None:
    folder = small_model().write()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    quantization = config["quantization_config"]
    owner = quantization if field == "ignore" else quantization["config_groups"]["group_0"]
    owner[field] = [pattern]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no usable quantization_config: .*re:"):
        WrittenCheckpoint(folder, None)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_config_that_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(
        CheckpointError, match=r"config\.json (is not a file|cannot be read .*bytes)"
    ):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        WrittenCheckpoint(tmp_path, None)


@pytest.mark.parametrize("value", [1, "fp8", [], True])
def test_quantization_config_that_is_no_object(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": value}))
    with pytest.raises(CheckpointError, match=r"quantization_config .* is not an object"):
        read_config(tmp_path)
