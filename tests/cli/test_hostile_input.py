"""Input of strangers: each ends with a sentence, whatever type a setting has or a name spells."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Answer, Command
from safetensors.torch import load_file, save_file

VALUES = (
    *(None, True, -1, 0, 3.5, 1e6, 10**30, "x", "", [], {}, [1], {"a": {"b": 1}}),
    *("\ud800", "\x1b[31m\u202e[red]\n", "x" * 100_000),
)
HOSTILE = "\x1b[31mred\u202e\x9b[red]"


def assert_a_sentence(answer: Answer, *about: object) -> None:
    said = answer.out + answer.err
    assert "defect of Steelyard" not in said and "Traceback" not in said, (about, said[-1500:])
    assert "--traceback shows where" not in said, (about, said[-1500:])
    assert len(answer.err) < 2500, (about, len(answer.err), answer.err[:300])
    assert not {"\x1b", "\u202e", "\x9b"} & set(said), about


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a document."""
    if path:
        yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value[:2]) if isinstance(value, list) else items
    for key, each in items:
        yield from places(each, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


@pytest.fixture(scope="module")
def quantized(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from steelyard.cli.app import run

    folder = tmp_path_factory.mktemp("hostile") / "W4A16"
    source = workplace / "path" / "to" / "model"
    assert run(["quantize", str(source), "-o", str(folder), "--scheme", "W4A16"]) == 0
    return folder


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("config.json", "quantize M -o O --scheme FP8_DYNAMIC"),
        ("config.json", "quantize M -o O --scheme FP8 --data D --samples 1 --max-seq-length 8"),
        ("tokenizer.json", "quantize M -o O --scheme FP8 --data D --samples 1 --max-seq-length 8"),
        ("config.json", "validate Q"),
        ("config.json", "inspect Q"),
    ],
)
def test_settings_of_any_type(
    file: str,
    command: str,
    steelyard: Command,
    model: Path,
    quantized: Path,
    workplace: Path,
    tmp_path: Path,
) -> None:
    source = quantized if "Q" in command.split() else model
    document = json.loads((source / file).read_text())
    cases = [(path, value) for path in places(document) for value in VALUES]
    copy, output = tmp_path / "model", tmp_path / "output"
    shutil.copytree(source, copy)
    words = {"M": copy, "Q": copy, "O": output, "D": workplace / "calibration.txt"}
    for path, value in random.Random(0).sample(cases, 12):
        (copy / file).write_text(json.dumps(changed(document, path, value)))
        answer = steelyard(*(words.get(word, word) for word in command.split()))
        assert_a_sentence(answer, file, path, value)
        shutil.rmtree(output, ignore_errors=True)


@pytest.mark.parametrize(
    ("dtype", "largest", "options"),
    [
        (torch.float64, None, "--scheme W4A16 --gptq --data D --samples 1 --max-seq-length 8"),
        (torch.bfloat16, 3.38e38, "--scheme W4A16"),
        (torch.bfloat16, 1e-40, "--scheme W4A16"),
    ],
)
def test_types_and_sizes_of_weights(
    dtype: torch.dtype,
    largest: float | None,
    options: str,
    steelyard: Command,
    model: Path,
    workplace: Path,
    tmp_path: Path,
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    tensors = {k: v.to(dtype) for k, v in load_file(copy / "model.safetensors").items()}
    if largest is not None:
        tensors["model.layers.0.self_attn.q_proj.weight"].fill_(largest)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    words = [str(workplace / "calibration.txt") if w == "D" else w for w in options.split()]
    answer = steelyard("quantize", copy, "-o", tmp_path / "output", *words)
    assert_a_sentence(answer, dtype, largest)
    assert largest is not None or answer.code == 0, answer.err


def test_names_that_act_on_a_terminal(
    steelyard: Command, model: Path, workplace: Path, tmp_path: Path
) -> None:
    folder = tmp_path / f"model{HOSTILE}"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": HOSTILE}))
    data = tmp_path / f"data{HOSTILE}.jsonl"
    data.write_text(json.dumps({HOSTILE: "w1 w2"}))
    output = tmp_path / f"out{HOSTILE}"
    commands = [
        ("inspect", folder),
        ("quantize", folder, "-o", output, "--scheme", "FP8_DYNAMIC"),
        ("validate", output),
        ("quantize", folder, "-o", tmp_path / "o", "--scheme", "FP8", "--data", data),
        ("quantize", model, "-o", tmp_path / "o", "--scheme", "FP8", "--data", data),
        ("quantize", tmp_path / f"none{HOSTILE}", "-o", tmp_path / "o", "--scheme", "FP8_DYNAMIC"),
        ("quantize", model, "-o", tmp_path / "o", "--scheme", HOSTILE),
        ("quantize", model, "-o", tmp_path / "o", "--scheme", "W4A16", "--ignore", HOSTILE),
        (HOSTILE,),
        ("inspect", model, f"--{HOSTILE}"),
    ]
    for command in commands:
        answer = steelyard(*command)
        assert_a_sentence(answer, command)
        if answer.code:
            assert "[red]" in answer.err, (command, answer.err)
