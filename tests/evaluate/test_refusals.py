"""What cannot be compared is refused with the reason, before the work where that can be known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import quantize, samples, static
from families import read, small_model
from safetensors.torch import save_file

from steelyard.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    PipelineError,
    SteelyardError,
)
from steelyard.evaluate import evaluate
from steelyard.model.layerwise import LayerwiseModel

Q_PROJ = "model.layers.1.self_attn.q_proj"
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "observer": "static_minmax"}
SIZES = {"hidden_size": 128, "num_hidden_layers": 2}
SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16": {"scheme": "W4A16"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "NVFP4": {"scheme": "NVFP4"},
    "static": {"config_groups": {"group_0": static(symmetric=False)}},
    "KV": {"kv_cache_scheme": KV},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama", **SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(scheme: str) -> Path:
        if scheme not in made:
            folder = tmp_path_factory.mktemp("quantized") / "q"
            made[scheme] = quantize(source, folder, **SCHEMES[scheme])
        return made[scheme]

    return make


def changed(
    folder: Path, output: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> Path:
    """Return a copy of a checkpoint with other tensors."""
    shutil.copytree(folder, output, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read(folder)
    change(tensors)
    save_file(tensors, output / "model.safetensors")
    return output


def configured(folder: Path, output: Path, **changes: Any) -> Path:
    shutil.copytree(folder, output)
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"].update(changes)
    (output / "config.json").write_text(json.dumps(config))
    return output


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("the work was started")

    monkeypatch.setattr(LayerwiseModel, "run", run)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("scheme", "missing"),
    [
        ("W4A16", f"{Q_PROJ}.weight_scale"),
        ("W4A16", f"{Q_PROJ}.weight_shape"),
        ("W4A16", f"{Q_PROJ}.weight_packed"),
        ("FP8_DYNAMIC", f"{Q_PROJ}.weight_scale"),
        ("NVFP4", f"{Q_PROJ}.weight_global_scale"),
        ("NVFP4", f"{Q_PROJ}.input_global_scale"),
        ("static", f"{Q_PROJ}.input_scale"),
        ("static", f"{Q_PROJ}.input_zero_point"),
        ("KV", "model.layers.1.self_attn.v_scale"),
    ],
)
def test_missing_parameter(
    scheme: str, missing: str, source: Path, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = changed(quantized(scheme), tmp_path / "q", lambda t: t.pop(missing))
    with pytest.raises(CheckpointError, match=missing):
        evaluate(source, broken, samples())


@pytest.mark.usefixtures("no_work")
def test_weight_that_is_not_quantized_though_the_config_says_so(
    source: Path, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = read(source)[f"{Q_PROJ}.weight"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{Q_PROJ}.weight_scale"]
        tensors[f"{Q_PROJ}.weight"] = plain

    broken = changed(quantized("FP8_DYNAMIC"), tmp_path / "q", change)
    with pytest.raises(CheckpointError, match=rf"quantizes {Q_PROJ}.*stored unquantized"):
        evaluate(source, broken, samples())


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore": ["lm_head", Q_PROJ]}, f"codes for {Q_PROJ}, but config.json has no scheme"),
        ({"quant_method": "awq"}, "quantized with 'awq', which is not read"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "has a transform_config"),
    ],
)
def test_config_that_is_not_understood(
    changes: dict[str, Any],
    message: str,
    source: Path,
    quantized: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    broken = configured(quantized("W4A16"), tmp_path / "q", **changes)
    with pytest.raises(CheckpointError, match=message):
        evaluate(source, broken, samples())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (f"{Q_PROJ}.weight_scale", "the output of model.layers.1 is"),
        ("model.layers.0.mlp.down_proj.weight_scale", "the output of model.layers.0 is"),
        ("model.embed_tokens.weight", "the input of the first layer is"),
        ("model.norm.weight", "its logits are"),
    ],
)
def test_parameter_that_is_not_a_number(
    name: str, place: str, source: Path, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = changed(quantized("W4A16"), tmp_path / "q", lambda t: t[name].fill_(torch.nan))
    with pytest.raises(NonFiniteError, match=rf"the quantized model \({broken}\).*: {place}"):
        evaluate(source, broken, samples())
    with pytest.raises(NonFiniteError, match=rf"the base model \({broken}\).*: {place}"):
        evaluate(broken, source, samples())


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "has 2 layers, .* has 3"),
        ({"vocab_size": 120}, "of 128 tokens, .* of 120"),
    ],
)
def test_other_models(changes: dict[str, int], message: str, source: Path, tmp_path: Path) -> None:
    small_model("llama", **{**SIZES, **changes}).save_pretrained(tmp_path / "other")
    with pytest.raises(PipelineError, match=message):
        evaluate(source, tmp_path / "other", samples())


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        (
            "tokenizer.json",
            tokens := '{"model": {"vocab": {"a": 0, "b": 1}}}',
            tokens[:-7] + "2}}}",
        ),
        ("tokenizer.json", tokens, '{"added_tokens": [{"id": 2, "content": "c"}], ' + tokens[1:]),
        ("tokenizer.json", tokens, "{"),
        ("tokenizer.model", "a", "b"),
    ],
)
def test_other_tokenizers(name: str, first: str, second: str, source: Path, tmp_path: Path) -> None:
    for folder, text in (("m", first), ("q", second)):
        shutil.copytree(source, tmp_path / folder)
        (tmp_path / folder / name).write_text(text)
    with pytest.raises(
        PipelineError, match=rf"{name} (and .* have different token ids|cannot be read)"
    ):
        evaluate(tmp_path / "m", tmp_path / "q", samples())


def test_tokenizers_that_are_written_differently_are_equal(source: Path, tmp_path: Path) -> None:
    for folder, extra in (("m", {}), ("q", {"truncation": None, "version": "1.0"})):
        shutil.copytree(source, tmp_path / folder)
        content = {**extra, "model": {"vocab": {"a": 0}, "merges": []}}
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps(content))
    assert evaluate(tmp_path / "m", tmp_path / "q", samples()).kl_divergence == 0


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "the list holds no data: it is empty"),
        (["", " "], {}, "its 2 samples are empty"),
        ([[5], [6]], {}, "none has a second token"),
        ([[5, 6]], {"max_seq_length": 1}, "none has a second token"),
        ([[5, 128]], {}, "128"),
        ([[5, 6]], {"num_samples": 0}, "num_samples must be at least 1"),
        ([[5, 6]], {"split": "test"}, "split='test' needs"),
        (["a text"], {}, "cannot be loaded"),
    ],
)
def test_data_that_cannot_be_scored(
    data: Any, options: dict[str, Any], message: str, source: Path
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        evaluate(source, source, data, **options)
    assert "calibration" not in str(caught.value)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_folder_that_is_no_checkpoint(lacking: str, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "q", ignore=shutil.ignore_patterns(lacking))
    for pair in ((source, tmp_path / "q"), (tmp_path / "q", source)):
        with pytest.raises(SteelyardError, match=str(tmp_path / "q")):
            evaluate(*pair, samples())
