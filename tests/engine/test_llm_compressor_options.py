"""Every argument of llm-compressor's `oneshot`, given by name as its scripts give it."""

from __future__ import annotations

import contextlib
import csv
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import read, small_model, token_batches
from llm_compressor_names import ONESHOT
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.engine.idle_options import IDLE
from steelyard.engine.oneshot_run import OneshotRun
from steelyard.engine.run_options import Options
from steelyard.errors import CalibrationWarning, DataError, PlanError
from steelyard.modifiers import AWQModifier, QuantizationModifier

W8A8 = QuantizationModifier(scheme="W8A8", ignore=["lm_head"])
STATIC = QuantizationModifier(scheme="FP8", ignore=["lm_head"])
UP = "model.layers.0.mlp.up_proj"
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32, "observer": "imatrix_mse"}
GROUPS = {"all": {"targets": ["Linear"], "weights": GROUP}}
IMPORTANCE = QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])
AWQ = [AWQModifier(), IMPORTANCE]


def test_every_argument_is_taken_by_name() -> None:
    taken = inspect.signature(oneshot).parameters
    assert [name for name in ONESHOT if name not in taken] == []


VALUES: dict[str, Any] = {
    "recipe_args": ["a=1"],
    "clear_sparse_session": True,
    "quantization_aware_calibration": False,
    "tracing_ignore": ["_update_causal_mask"],
    "sequential_offload_device": "cuda:1",
    "sequential_prefetch": True,
    "sequential_targets_per_subgraph": 4,
    "min_tokens_per_module": 0.1,
    "pad_to_max_length": True,
    "overwrite_cache": True,
    "preprocessing_num_workers": 8,
    "dataloader_num_workers": 2,
    "remove_columns": ["text"],
}


def test_idle_options_change_nothing_and_are_noted(source: Path, tmp_path: Path) -> None:
    assert VALUES.keys() == IDLE.keys()
    plain = oneshot(source, W8A8, None, tmp_path / "plain")
    given = oneshot(source, W8A8, None, tmp_path / "given", **VALUES)
    assert_close(read(tmp_path / "given"), read(tmp_path / "plain"), rtol=0, atol=0)
    added = [note for note in given.notes if note not in plain.notes]
    assert [note.partition("=")[0] for note in added] == [
        name for name in inspect.signature(oneshot).parameters if name in IDLE
    ]
    assert all("has no effect: " in note for note in added)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config_name": "another/model"}, "from_pretrained"),
        ({"dvc_data_repository": "https://example.org/data"}, "dvc get"),
        ({"precision": "float7"}, "float32"),
        ({"sequential_targets": ["LamaDecoderLayer"]}, "use LlamaDecoderLayer"),
        ({"sequential_targets": ["ExpertMLPs"]}, "use LlamaDecoderLayer"),
        ({"stage": "sparsity"}, "stages"),
        ({"pipeline": "independant"}, "known: auto"),
        ({"dataset_path": "dvc://data", "dataset": "custom"}, "dvc get"),
        ({"dataset_path": "data.json", "dataset": [[1, 2]]}, "remove one"),
        ({"dataset": [[1, 2]], "streaming": True}, "streaming needs the name of a dataset"),
    ],
)
def test_options_that_cannot_have_their_effect(
    options: dict[str, Any], said: str, source: Path, tmp_path: Path
) -> None:
    """Refused before any work, with the remedy."""
    with pytest.raises((DataError, PlanError, ValueError), match=said):
        oneshot(source, STATIC, output_dir=tmp_path / "q", **{"dataset": [[1, 2]], **options})
    assert not (tmp_path / "q").exists()


# -- model ----------------------------------------------------------------------------------------


def test_own_config_is_no_other(source: Path, tmp_path: Path) -> None:
    oneshot(str(source), W8A8, None, tmp_path / "q", config_name=str(source))


def test_precision_is_the_type_of_what_is_stored(source: Path, tmp_path: Path) -> None:
    result = oneshot(str(source), W8A8, None, tmp_path / "q", precision="float16")
    written = read(tmp_path / "q")
    expected = read(source)["model.embed_tokens.weight"].half()
    assert_close(written["model.embed_tokens.weight"], expected, rtol=0, atol=0)
    assert written[f"{UP}.weight_scale"].dtype == torch.float16
    assert result.model.dtype == torch.float16
    with pytest.raises(PlanError, match=r"model\.to\(torch\.float16\)"):
        oneshot(small_model("llama"), W8A8, precision="half")


@pytest.mark.parametrize("loaded", [False, True])
def test_untied_head_is_stored(loaded: bool, tmp_path: Path) -> None:
    model = small_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "m")
    given = model if loaded else tmp_path / "m"
    oneshot(given, W8A8, None, tmp_path / "q", tie_word_embeddings=False)
    written = read(tmp_path / "q")
    assert_close(written["lm_head.weight"], written["model.embed_tokens.weight"], rtol=0, atol=0)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" not in read(tmp_path / "m")


def test_uncompressed_output_has_the_values_of_the_compressed_one(
    source: Path, tmp_path: Path
) -> None:
    oneshot(source, W8A8, None, tmp_path / "q")
    oneshot(source, W8A8, None, tmp_path / "plain", save_compressed=False)
    codes, plain = read(tmp_path / "q"), read(tmp_path / "plain")
    assert {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in read(source).items()}
    decoded = codes[f"{UP}.weight"].to(torch.bfloat16) * codes[f"{UP}.weight_scale"]
    assert_close(plain[f"{UP}.weight"], decoded, rtol=0, atol=0)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config


# -- pipeline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [None, "independent"])
def test_default_pipelines_of_llm_compressor(
    pipeline: str | None, source: Path, tmp_path: Path
) -> None:
    targets = ["LlamaDecoderLayer", "LlamaMLP"]  # layers, and modules inside them
    oneshot(source, STATIC, token_batches(), tmp_path / "plain")
    oneshot(
        source,
        STATIC,
        token_batches(),
        tmp_path / "q",
        pipeline=pipeline,
        sequential_targets=targets,
    )
    assert_close(read(tmp_path / "q"), read(tmp_path / "plain"), rtol=0, atol=0)


def test_log_file_has_plan_and_result_or_error(source: Path, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    oneshot(source, W8A8, None, tmp_path / "q", log_dir=logs)
    with pytest.raises(DataError):
        oneshot(source, STATIC, None, tmp_path / "r", log_dir=logs)
    good, bad = sorted(logs.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert good.name.startswith("oneshot_") and good.suffix == ".log"
    assert "will quantize 21 modules" in good.read_text() and "checkpoint:" in good.read_text()
    assert "failed: DataError" in bad.read_text()


# -- recipe ---------------------------------------------------------------------------------------


def test_without_a_recipe_the_model_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    result = oneshot(source, output_dir=tmp_path / "copy")
    assert_close(read(tmp_path / "copy"), read(source), rtol=0, atol=0)
    assert any("without a recipe nothing is quantized" in note for note in result.notes)
    model = small_model("llama")
    oneshot(model)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config


def test_stage_chooses_modifiers_and_the_folder(source: Path, tmp_path: Path) -> None:
    stages = {
        "first_stage": {"quantization_modifiers": {"QuantizationModifier": {"scheme": "W8A8"}}},
        "second_stage": {
            "quantization_modifiers": {
                "QuantizationModifier": {"scheme": "FP8_DYNAMIC", "ignore": ["lm_head"]}
            }
        },
    }
    result = oneshot(source, stages, None, tmp_path / "q", stage="second")
    assert result.output_dir == tmp_path / "q" / "second"
    assert read(tmp_path / "q" / "second")[f"{UP}.weight"].dtype == torch.float8_e4m3fn


# -- data -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Path:
    from steelyard.demo import model_folder

    return model_folder()


def batches(model: Path, dataset: Any, **options: Any) -> list[list[list[int]]]:
    """Return the token ids that a run calibrates with."""
    options = {"max_seq_length": 8, "shuffle_calibration_samples": False, **options}
    given = Options(
        model=model, recipe=STATIC, dataset=dataset, output_dir="not-written", **options
    )
    with contextlib.ExitStack() as undo:
        run = OneshotRun(given, undo)
        run.make_plan()
        run.load_data()
    assert run.samples is not None
    return [batch["input_ids"].tolist() for batch in run.samples.batches]


TEXTS = [f"def f{i}(x): return x ** {i} - {7 * i}\n" * 8 for i in range(8)]


@pytest.fixture(scope="module")
def expected(demo: Path) -> list[list[list[int]]]:
    """The first tokens of each text, by transformers' own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    return [[tokenizer(text)["input_ids"][:8]] for text in TEXTS]


def test_preprocessing_function(demo: Path, tmp_path: Path, expected: Any) -> None:
    rows = [{"code": text} for text in TEXTS]
    made = batches(demo, rows, preprocessing_func=lambda row: {"text": row["code"]})
    assert made == expected
    (tmp_path / "own.py").write_text("def to_text(row):\n    return {'text': row['code']}\n")
    assert batches(demo, rows, preprocessing_func=f"{tmp_path / 'own.py'}:to_text") == expected
    with pytest.raises(DataError, match="preprocessing fails"):
        batches(demo, rows, preprocessing_func=lambda row: row["txt"])
    with pytest.raises(DataError, match=r"path/to/file\.py:name"):
        batches(demo, rows, preprocessing_func="to_text")


def test_files_by_path(demo: Path, tmp_path: Path, expected: Any) -> None:
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in TEXTS)])
    assert batches(demo, "csv", dataset_path=path) == expected
    assert batches(demo, None, dataset_path=path) == expected
    assert batches(demo, path) == expected


def test_dataset_objects_with_splits(demo: Path, expected: Any) -> None:
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_dict({"text": [*TEXTS, "another"]})
    both = datasets.DatasetDict({"train": train, "test": train})
    splits: Any
    for splits in ("train[:8]", ["train[:8]"], {"calibration": "train[:8]"}):
        assert batches(demo, both, splits=splits) == expected
    with pytest.raises(DataError, match="'calibration'"):
        batches(demo, both, splits={"a": "train", "b": "test"})
    with pytest.raises(DataError, match="one split"):
        batches(demo, both, splits=["train", "test"])


def test_folder_with_configuration_and_streaming(
    demo: Path, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "part.jsonl").write_text(lines)
    name = str(folder)
    assert batches(demo, name, streaming=True, dataset_config_name="default") == expected
    files = {"data_files": "part.jsonl"}
    assert batches(demo, name, raw_kwargs=files, splits="train") == expected


def test_concatenated_rows_fill_samples(source: Path) -> None:
    rows = torch.arange(36).reshape(3, 12) + 3
    joined = [[list(range(3, 19))], [list(range(19, 35))]]  # the last 4 tokens are dropped
    assert batches(source, rows, max_seq_length=16, concatenate_data=True) == joined
    alone = [[list(range(3, 15))]]  # too few for a whole sample
    with pytest.warns(CalibrationWarning, match="12 tokens only"):
        assert batches(source, rows[:1], max_seq_length=16, concatenate_data=True) == alone


@pytest.mark.parametrize("recipe", [IMPORTANCE, AWQ], ids=["importance", "awq"])
def test_only_tokens_of_the_loss_mask_count(recipe: Any) -> None:
    """Causal attention: tokens at the end change no state before them, so they can be cut off."""
    ids = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, 25:] = 0
    rows = [{"input_ids": a, "loss_mask": b} for a, b in zip(ids, mask, strict=True)]
    results = []
    for data, used in ((rows, True), (ids[:, :25], False), (ids, False)):
        model = small_model("llama", torch.float32)
        oneshot(model, recipe, data, use_loss_mask=used, shuffle_calibration_samples=False)
        results.append({n: p.detach().clone() for n, p in model.named_parameters()})
    masked, cut, whole = results
    assert_close(masked, cut)
    assert any(not torch.equal(masked[name], whole[name]) for name in masked)


def test_loss_mask_must_be_there_exactly_if_it_is_used() -> None:
    row = {"input_ids": [5, 6, 7] * 90, "loss_mask": [1, 1, 1] * 90}
    wrong: list[tuple[Any, bool, str]] = [
        ([row], False, "pass use_loss_mask=True, or remove the column"),
        ([row["input_ids"]], True, "add that column"),
        ([{**row, "loss_mask": [1, 1]}], True, r"loss_mask has shape \(1, 2\)"),
    ]
    for data, used, said in wrong:
        with pytest.raises(DataError, match=said):
            oneshot(small_model("llama"), IMPORTANCE, data, use_loss_mask=used)


def test_built_in_text_warns(demo: Path) -> None:
    with pytest.warns(CalibrationWarning, match="Python source code"):
        made = batches(demo, "demo", num_calibration_samples=4, max_seq_length=64)
    assert [len(ids) for (ids,) in made] == [64] * 4
