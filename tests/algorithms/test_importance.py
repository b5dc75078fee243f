"""Importance that is saved, loaded, added up, and taken from llama.cpp's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import read, token_batches
from interruption import Stop, stop_at_mark
from safetensors.torch import save_file
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.checkpoint import CheckpointWriter
from steelyard.errors import CheckpointError, ImportanceError, PlanError
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
from steelyard.observers.importance_file import load_importance, merge_importance, save_importance


def int3(**options: Any) -> QuantizationModifier:
    args = {"num_bits": 3, "strategy": "group", "group_size": 32, "observer": "optimal"}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**args, **options}}}
    return QuantizationModifier(config_groups=groups, ignore=["lm_head"])


@pytest.fixture(scope="module")
def gathered(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with data, which saves what it gathered."""
    folder = tmp_path_factory.mktemp("gathered")
    gatherer = IMatrixGatherer(save_to=str(folder / "importance.safetensors"))
    oneshot(source, [gatherer, int3()], token_batches(), folder / "q")
    return folder


def test_what_was_saved_is_what_flowed(source: Path, gathered: Path) -> None:
    from transformers import AutoModelForCausalLM

    importance = load_importance(gathered / "importance.safetensors")
    assert len(importance) == 21
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.model.layers[2].mlp.down_proj.register_forward_pre_hook(
        lambda _m, args: seen.append(args[0].flatten(0, 1).double().square().sum(0))
    )
    with torch.no_grad():
        for batch in token_batches():
            model(batch)
    squares, tokens = importance["model.layers.2.mlp.down_proj"]
    assert tokens == sum(batch.numel() for batch in token_batches())
    assert_close(squares.double(), torch.stack(seen).sum(0), rtol=1e-5, atol=1e-7)


def test_loaded_importance_needs_no_data(source: Path, gathered: Path, tmp_path: Path) -> None:
    """From file to file, and with the same result as the run that gathered it."""
    file = str(gathered / "importance.safetensors")
    oneshot(source, [IMatrixGatherer(load_from=file), int3()], None, tmp_path / "a")
    assert_close(read(tmp_path / "a"), read(gathered / "q"), rtol=0, atol=0)
    oneshot(source, int3(), None, tmp_path / "plain")
    plain = read(tmp_path / "plain")
    assert any(not torch.equal(plain[n], t) for n, t in read(tmp_path / "a").items())
    weighed = int3(observer="imatrix_mse")
    oneshot(source, [IMatrixGatherer(load_from=file), weighed], None, tmp_path / "b")


def test_runs_add_up(source: Path, gathered: Path, tmp_path: Path) -> None:
    batches = token_batches()
    for i, part in enumerate((batches[:1], batches[1:])):
        gatherer = IMatrixGatherer(save_to=str(tmp_path / f"{i}.safetensors"))
        oneshot(source, [gatherer, int3()], part, tmp_path / f"q{i}")
    files = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    merged = merge_importance(*(load_importance(file) for file in files))
    whole = load_importance(gathered / "importance.safetensors")
    assert merged.keys() == whole.keys()
    for name, (squares, tokens) in merged.items():
        assert tokens == whole[name][1]
        assert_close(squares, whole[name][0], rtol=1e-5, atol=1e-7)
    save_importance(merged, tmp_path / "merged.safetensors")
    both, one = tmp_path / "both", tmp_path / "one"
    oneshot(source, [IMatrixGatherer(load_from=files), int3()], None, both)
    merged_file = str(tmp_path / "merged.safetensors")
    oneshot(source, [IMatrixGatherer(load_from=merged_file), int3()], None, one)
    assert_close(read(both), read(one), rtol=0, atol=0)


def test_gptq_takes_loaded_importance_too(source: Path, gathered: Path, tmp_path: Path) -> None:
    gptq = GPTQModifier(config_groups=int3().config_groups, ignore=["lm_head"])
    file = str(gathered / "importance.safetensors")
    oneshot(source, [IMatrixGatherer(load_from=file), gptq], token_batches(), tmp_path / "q")
    assert "model.layers.0.mlp.up_proj.weight_packed" in read(tmp_path / "q")


def test_llama_cpp(source: Path, gathered: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    importance = load_importance(gathered / "importance.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "llama")
    writer.add_type("imatrix")
    for module, (squares, tokens) in importance.items():
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        writer.add_tensor(f"{name}.in_sum2", squares.numpy().reshape(1, -1))
        writer.add_tensor(f"{name}.counts", torch.tensor([[float(tokens)]]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_importance(tmp_path / "imatrix.gguf", importance, "llama")
    assert loaded.keys() == importance.keys()
    for name, (squares, tokens) in loaded.items():
        assert tokens == importance[name][1]
        assert_close(squares, importance[name][0], rtol=0, atol=0)
    file = str(tmp_path / "imatrix.gguf")
    oneshot(source, [IMatrixGatherer(load_from=file), int3()], None, tmp_path / "q")
    assert_close(read(tmp_path / "q"), read(gathered / "q"), rtol=0, atol=0)


def test_files_that_are_none(source: Path, gathered: Path, tmp_path: Path) -> None:
    with pytest.raises(ImportanceError, match="no importance file"):
        load_importance(tmp_path / "missing")
    (tmp_path / "text").write_text("x")
    with pytest.raises(ImportanceError, match="not an importance file"):
        load_importance(tmp_path / "text")
    save_file({"x": torch.ones(1)}, tmp_path / "tensors")
    with pytest.raises(ImportanceError, match="holds tensors, not importance"):
        load_importance(tmp_path / "tensors")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(64))
    pytest.importorskip("gguf")
    with pytest.raises(ImportanceError):
        load_importance(tmp_path / "x.gguf", ["a"])
    whole = load_importance(gathered / "importance.safetensors")
    with pytest.raises(ImportanceError, match="not of one model"):
        merge_importance(whole, {name: (t[:5], 1) for name, (t, _) in whole.items()})
    short = {name: (squares[:5], 1) for name, (squares, _) in whole.items()}
    save_importance(short, tmp_path / "short")
    strict = int3(observer_kwargs={"strict": True})
    recipe = [IMatrixGatherer(load_from=str(tmp_path / "short")), strict]
    with pytest.raises(ImportanceError, match="5 input channels for model"):
        oneshot(source, recipe, None, tmp_path / "q")
    save_importance({"elsewhere": (torch.ones(64), 1)}, tmp_path / "other")
    with pytest.raises(ImportanceError, match="for none of the modules"):
        recipe = [IMatrixGatherer(load_from=str(tmp_path / "other")), strict]
        oneshot(source, recipe, None, tmp_path / "q")
    for bad in ((torch.full((64,), float("nan")), 1), (-torch.ones(64), 1), (torch.ones(64), 0)):
        save_importance({"a": bad}, tmp_path / "bad")
        with pytest.raises(ImportanceError, match="invalid sums of squares for a"):
            load_importance(tmp_path / "bad")
    with pytest.raises(ImportanceError, match="is not a folder"):
        save_importance(whole, tmp_path / "nowhere" / "x")


def test_changed_importance_is_another_run(
    source: Path, gathered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "mark_seconds", 0.0)
    file = tmp_path / "importance.safetensors"
    whole = load_importance(gathered / "importance.safetensors")
    save_importance(whole, file)
    recipe = [IMatrixGatherer(load_from=str(file)), int3()]
    with monkeypatch.context() as patch:
        stop_at_mark(patch, 1)
        with pytest.raises(Stop):
            oneshot(source, recipe, None, tmp_path / "q")
    save_importance({name: (2 * squares + 1, n) for name, (squares, n) in whole.items()}, file)
    with pytest.raises(CheckpointError, match=r"importance\.safetensors was"):
        oneshot(source, recipe, None, tmp_path / "q")


def test_importance_that_nobody_gathers_cannot_be_saved(source: Path, tmp_path: Path) -> None:
    gatherer = IMatrixGatherer(save_to=str(tmp_path / "x"))
    plain = QuantizationModifier(
        scheme="FP8_DYNAMIC", ignore=["lm_head"], weight_observer="memoryless_minmax"
    )
    with pytest.raises(PlanError, match="IMatrixGatherer has no effect"):
        oneshot(source, [gatherer, plain], token_batches(), tmp_path / "q")
