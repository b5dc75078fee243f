"""The report of a run against the files that the run wrote, and what reading one refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from families import read, small_model, token_batches
from interruption import Stop, lasting, stop_at_mark
from reports import HOSTILE, hostile, layered, studied

from steelyard import oneshot
from steelyard.checkpoint import CheckpointWriter
from steelyard.errors import ReportError
from steelyard.modifiers import QuantizationModifier
from steelyard.report import (
    ComparisonRow,
    Report,
    add_evaluation,
    decibels,
    read_report,
    write_files,
)

STATIC = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor"},
}
EVALUATION = {
    "tokens": 4096,
    "base_perplexity": 7.5,
    "perplexity": 7.75,
    "kl_divergence": 0.01,
    "top1_agreement": 0.97,
    "seconds": 3.5,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    small_model("llama").save_pretrained(folder)
    return folder


def recipe(**options: Any) -> QuantizationModifier:
    return QuantizationModifier(**options, ignore=["lm_head"])


def grouped() -> QuantizationModifier:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    return recipe(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})


# -- of a run -----------------------------------------------------------------------------------


def test_every_run_leaves_a_report_beside_its_checkpoint(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    result = oneshot(source, grouped(), output_dir=out)
    assert {"report.json", "report.html"} <= {path.name for path in out.iterdir()}
    report = read_report(out)
    assert report.schema_version == 1
    assert [m.name for m in report.modules] == [p.name for p in result.plan.quantized]
    assert {m.name: m.error for m in report.modules} == {
        n: m.error for n, m in result.modules.items()
    }
    assert [(x.name, x.reason) for x in report.left] == [
        (x.name, x.reason) for x in result.plan.left
    ]
    assert report.recipe == (out / "recipe.yaml").read_text()
    assert report.notes == result.notes
    assert report.changed == []
    changed = replace(result, changed=["model.norm.weight", "lm_head.weight"])
    assert Report.of(changed, folder=out).changed == ["lm_head.weight", "model.norm.weight"]
    summary = report.summary
    assert summary is not None
    assert summary.model == "small-llama"
    assert 0 < summary.seconds <= result.seconds
    assert summary.peak_memory is not None and summary.peak_memory > 10**8
    assert summary.versions["torch"] == torch.__version__
    assert [use.label for use in summary.schemes] == ["W4A16"]
    assert summary.schemes[0].weights == "int4, group of 32, symmetric, optimal"


def test_sizes_are_those_of_the_files(source: Path, tmp_path: Path) -> None:
    oneshot(source, grouped(), output_dir=tmp_path / "q")
    report = read_report(tmp_path / "q")
    before, after = read(source), read(tmp_path / "q")
    modules = [m.name for m in report.modules]
    weights = sum(before[f"{m}.weight"].numel() for m in modules)
    stored = {
        m: sum(t.nbytes for n, t in after.items() if n.rpartition(".")[0] == m) for m in modules
    }
    assert {m.name: m.bytes_after for m in report.modules} == stored
    assert {m.name: m.bytes_before for m in report.modules} == {
        m: before[f"{m}.weight"].nbytes for m in modules
    }
    summary = report.summary
    assert summary is not None
    assert summary.output_bytes == sum(t.nbytes for t in after.values())
    assert summary.source_bytes == sum(t.nbytes for t in before.values())
    assert summary.bits_per_weight == round(8 * sum(stored.values()) / weights, 4)
    everything = sum(t.numel() for t in before.values())
    assert summary.bits_per_weight_overall == round(8 * summary.output_bytes / everything, 4)


def test_places_of_modules(tmp_path: Path) -> None:
    small_model("qwen3_moe").save_pretrained(tmp_path / "m")
    ignore = ["lm_head", "re:.*mlp.gate$"]
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    modifier = QuantizationModifier(config_groups=groups, ignore=ignore)
    oneshot(tmp_path / "m", modifier, output_dir=tmp_path / "q")
    found = {m.name: (m.kind, m.depth, m.expert) for m in read_report(tmp_path / "q").modules}
    assert found["model.layers.1.self_attn.q_proj"] == ("self_attn.q_proj", 1, None)
    expert = "model.layers.2.mlp.experts.3.down_proj"
    assert found[expert] == ("mlp.experts.*.down_proj", 2, 3)
    assert len(found) == 3 * (4 + 4 * 3)


def test_tokens_and_static_scales(source: Path, tmp_path: Path) -> None:
    modifier = recipe(config_groups={"group_0": STATIC})
    oneshot(source, modifier, token_batches(), tmp_path / "q")
    stored = read(tmp_path / "q")
    tokens = sum(batch.numel() for batch in token_batches())
    for module in read_report(tmp_path / "q").modules:
        assert module.tokens == tokens
        scale = float(stored[f"{module.name}.input_scale"])
        assert module.activations["input_scale"] == pytest.approx([scale, scale], rel=1e-5)


def test_cache_scales_have_no_weights(source: Path, tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    modifier = QuantizationModifier(kv_cache_scheme=cache)
    oneshot(source, modifier, token_batches(), tmp_path / "q")
    stored = read(tmp_path / "q")
    modules = read_report(tmp_path / "q").modules
    assert [m.kind for m in modules] == ["self_attn"] * 3
    for module in modules:
        assert module.shape is module.error is module.weight is module.scale is None
        for leaf in ("k_scale", "v_scale"):
            expected = float(stored[f"{module.name}.{leaf}"])
            assert module.activations[leaf] == pytest.approx([expected] * 2, rel=1e-5)


def test_output_with_a_report_can_be_written_over(source: Path, tmp_path: Path) -> None:
    oneshot(source, grouped(), output_dir=tmp_path / "q")
    oneshot(source, recipe(scheme="FP8_DYNAMIC"), output_dir=tmp_path / "q", overwrite=True)
    summary = read_report(tmp_path / "q").summary
    assert summary is not None and [use.label for use in summary.schemes] == ["W8A8-FP"]


@pytest.mark.parametrize("data", [False, True], ids=["stream", "layers"])
def test_resumed_run_has_the_report_of_one_that_was_not(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bool
) -> None:
    monkeypatch.setattr(CheckpointWriter, "mark_seconds", 0.0)
    modifier = recipe(config_groups={"group_0": STATIC}) if data else grouped()
    samples = token_batches() if data else None
    oneshot(source, modifier, samples, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at_mark(patch, 2)
        with pytest.raises(Stop):
            oneshot(source, modifier, samples, tmp_path / "q")
    oneshot(source, modifier, samples, tmp_path / "q")
    assert any("resumed after" in note for note in read_report(tmp_path / "q").notes)
    for name in ("report.json", "report.html"):
        assert lasting(tmp_path / "q" / name) == lasting(tmp_path / "whole" / name)


def test_module_in_memory_leaves_a_report_when_it_is_saved(tmp_path: Path) -> None:
    model = small_model("llama")
    result = oneshot(model, grouped())
    assert result.output_dir is None
    model.save_pretrained(tmp_path / "q")
    report = read_report(tmp_path / "q")
    assert report.summary is not None and report.summary.model == "LlamaForCausalLM"
    assert len(report.modules) == 21
    assert all(m.weight is not None for m in report.modules)


# -- as a value ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "report", [Report(), layered(2), hostile(), studied()], ids=["empty", "run", "names", "verdict"]
)
def test_json_round_trip(report: Report) -> None:
    text = report.to_json()
    assert text.isascii()
    assert Report.from_json(text) == report


def test_unknown_version_is_refused() -> None:
    text = json.dumps({**json.loads(layered(1).to_json()), "schema_version": 2})
    with pytest.raises(
        ReportError, match="schema_version 2, but this version of Steelyard reads 1; use"
    ):
        Report.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema_version None"),
        ('{"schema_version": 1, "moduls": []}', "is invalid at moduls"),
        ('{"schema_version": 1, "modules": [{}]}', r"is invalid at modules\.0\.name"),
    ],
)
def test_what_is_no_report_is_refused(text: str, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        Report.from_json(text)


def test_decibels() -> None:
    assert decibels(0.01) == 20.0
    assert decibels(2.0) == pytest.approx(-3.0103)
    assert decibels(0.0) is None and decibels(None) is None


def test_evaluation_is_added_to_both_files(source: Path, tmp_path: Path) -> None:
    oneshot(source, grouped(), output_dir=tmp_path / "q")
    before = read_report(tmp_path / "q")
    returned = add_evaluation(tmp_path / "q", EVALUATION)
    after = read_report(tmp_path / "q")
    assert after == returned
    assert after.evaluation == EVALUATION
    assert after.model_copy(update={"evaluation": None}) == before
    assert Data.of((tmp_path / "q" / "report.html").read_text("utf-8")) == after
    names = {path.name for path in (tmp_path / "q").iterdir()}
    assert not [name for name in names if name.startswith(".")]


def test_evaluation_may_be_infinite(tmp_path: Path) -> None:
    write_files(layered(1), tmp_path)
    report = add_evaluation(tmp_path, {"perplexity": math.inf, "kl_divergence": math.nan})
    assert report.evaluation == {"perplexity": "inf", "kl_divergence": "nan"}
    assert read_report(tmp_path) == report


def test_evaluation_needs_a_report(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"report\.json cannot be read: No such file"):
        add_evaluation(tmp_path, EVALUATION)


def test_failure_to_write_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ReportError, match=r"report\.html cannot be written: Is a directory"):
        write_files(layered(1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_comparison_needs_no_run(tmp_path: Path) -> None:
    rows = [ComparisonRow(scheme="W4A16", observer="optimal", error=1e-3, layers=[1e-3, None])]
    write_files(Report(title="both", comparison=rows), tmp_path)
    report = read_report(tmp_path)
    assert report.summary is None and report.comparison == rows


# -- the page as text ---------------------------------------------------------------------------


class Data(HTMLParser):
    """Reads the report back out of its page, as a browser's parser would find it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.text = ""
        self.title = ""
        self._inside = ""

    @classmethod
    def parse(cls, page: str) -> Data:
        parser = cls()
        parser.feed(page)
        parser.close()
        return parser

    @classmethod
    def of(cls, page: str) -> Report:
        return Report.from_json(cls.parse(page).text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = "report" if ("id", "report") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "report":
            self.text += data
        if self._inside == "title":
            self.title += data


def test_names_stay_data() -> None:
    plain = Data.parse(hostile(lambda name: "harmless").to_html())
    page = hostile().to_html()
    parsed = Data.parse(page)
    assert parsed.tags == plain.tags
    assert Report.from_json(parsed.text) == hostile()
    assert parsed.title.startswith(HOSTILE[0])
    assert not {"<", ">", "&", "\u2028", "\u2029"}.intersection(parsed.text)


def test_page_asks_for_nothing() -> None:
    page = layered(1).to_html()
    assert "default-src 'none'" in page
    assert "unsafe" not in page
    for word in ("http:", "https:", "@import", "url(", "innerHTML", "eval(", "fetch("):
        found = page.replace("http://www.w3.org/2000/svg", "")
        assert word not in found, word
