"""Code and pickles that come with a checkpoint are not run, whatever is typed or piped in."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_model
from safetensors.torch import load_file, save_file

from steelyard import oneshot
from steelyard.errors import CheckpointError, PipelineError, SteelyardError
from steelyard.evaluate import evaluate

STATIC = """
QuantizationModifier:
  config_groups:
    all:
      targets: [Linear]
      weights: {num_bits: 8, strategy: channel}
      input_activations: {num_bits: 8, strategy: tensor}
  ignore: [lm_head]
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the code of the model would create; transformers copies such code to its own folder."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "marker"


@pytest.fixture
def model(tmp_path: Path, marker: Path) -> Path:
    folder = tmp_path / "model"
    small_model("llama").save_pretrained(folder)
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig): model_type = 'evil'\n"
        "class Model(LlamaForCausalLM): config_class = Config\n"
        "class Tokenizer(PreTrainedTokenizerFast): pass\n"
    )
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one two three\n" * 20)
    return path


def with_tokenizer(folder: Path) -> None:
    map_ = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(map_))


def with_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config |= {"model_type": "evil", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("bring", [with_tokenizer, with_config])
@pytest.mark.parametrize("how", ["oneshot", "evaluate", "observe"])
def test_yes_on_stdin_runs_nothing(
    bring: Callable[[Path], None],
    how: str,
    model: Path,
    marker: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bring(model)
    reading, writing = os.pipe()
    os.write(writing, b"y\n" * 50)
    os.close(writing)
    with os.fdopen(reading) as answers, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", answers)
        with pytest.raises(SteelyardError, match=r"custom code"):
            if how == "evaluate":
                evaluate(model, model, str(text))
            elif how == "observe":
                oneshot(model, STATIC, str(text), save_statistics=tmp_path / "s")
            else:
                oneshot(model, STATIC, str(text), tmp_path / "out")
        assert answers.read() == "y\n" * 50  # nobody asked
    assert not marker.exists() and "[y/N]" not in capsys.readouterr().out


def test_data_free_run_needs_no_code(model: Path, marker: Path, tmp_path: Path) -> None:
    with_tokenizer(model)
    with_config(model)
    oneshot(model, {"QuantizationModifier": {"scheme": "FP8_DYNAMIC"}}, None, tmp_path / "out")
    assert not marker.exists()


@pytest.mark.parametrize("how", ["oneshot", "evaluate"])
def test_code_is_run_where_it_is_asked_for(
    how: str, model: Path, marker: Path, text: Path, tmp_path: Path
) -> None:
    """Or the tests above would pass with code that nobody could run."""
    with_tokenizer(model)
    with pytest.raises(SteelyardError):  # it is no whole tokenizer
        if how == "evaluate":
            evaluate(model, model, str(text), trust_remote_code_model=True)
        else:
            oneshot(model, STATIC, str(text), tmp_path / "out", trust_remote_code_model=True)
    assert marker.exists()


def test_command_line_with_yes_piped_in(model: Path, marker: Path, text: Path) -> None:
    with_tokenizer(model)
    recipe = model.parent / "recipe.yaml"
    recipe.write_text(STATIC)
    command = ["quantize", str(model), "-o", str(model.parent / "out"), "--recipe", str(recipe)]
    run = subprocess.run(
        [sys.executable, "-m", "steelyard", *command, "--data", str(text)],
        input="y\n" * 100,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert not marker.exists()
    assert run.returncode == 1 and "[y/N]" not in run.stdout
    assert "--trust-remote-code" in run.stderr


# -- pickles ------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("kind", ["weights", "bomb"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "weights.safetensors", "model-00001-of-00002.safetensors"]
)
def test_pytorch_model_beside_incomplete_safetensors(
    kind: str, name: str, model: Path, marker: Path, tmp_path: Path
) -> None:
    """It would fill what is missing; but it is a pickle, and may be of another model."""
    tensors = load_file(model / "model.safetensors")
    if kind == "weights":
        torch.save(tensors, model / "pytorch_model.bin")
    else:
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    (model / "model.safetensors").unlink()
    save_file(tensors, model / name, metadata={"format": "pt"})
    data = [torch.arange(32).reshape(1, 32) % 16]
    said = r"lack tensors|has no tensor for|the download is incomplete"
    with pytest.raises((PipelineError, CheckpointError), match=said):
        oneshot(model, STATIC, data, tmp_path / "out")
    assert not marker.exists()
