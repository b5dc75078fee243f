"""A folder to work in, and two ways to give a command: here, and in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Answer, Command, environment_with

WORDS = ["<s>", "<unk>", *(f"w{i}" for i in range(40))]
RECIPE = """
QuantizationModifier:
  scheme: NVFP4
  ignore: [lm_head]
"""


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the examples in the help name."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from families import small_model

    folder = tmp_path_factory.mktemp("cli")
    model = small_model("llama", hidden_size=128, intermediate_size=256)
    model.save_pretrained(folder / "path" / "to" / "model")
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder / "path" / "to" / "model")
    for name, step in (("calibration.txt", 7), ("held-out.txt", 11)):
        text = " ".join(f"w{i * step % 40}" for i in range(4000))
        (folder / name).write_text(text)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def model(workplace: Path) -> Path:
    return workplace / "path" / "to" / "model"


@pytest.fixture
def steelyard(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    """Give a command in this process; its settings are undone afterwards."""
    from steelyard.cli.app import run

    before = dict(os.environ)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def command(*arguments: object) -> Answer:
        capsys.readouterr()
        code = run([str(each) for each in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    yield command
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.fixture
def process(tmp_path: Path) -> Command:
    """Give a command in a process of its own, as a user does."""

    def command(*arguments: object, **environment: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "steelyard", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment_with(**environment),
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return command
