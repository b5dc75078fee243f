"""What the tables in docs/ state is so: held against the code, written files and results."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return what stands below a heading, up to the next of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    assert text.count(f"\n{heading}\n") == 1, heading
    below = text.split(f"\n{heading}\n")[1]
    return re.split(rf"^#{{1,{level}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str, first: str) -> list[list[str]]:
    """Return the rows below the header row that begins with the cell `first`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def bare(cell: str) -> str:
    return cell.replace("`", "")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# -- observers --------------------------------------------------------------------------------


def load_tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def our_observers() -> list[str]:
    from steelyard.observers import Observer

    names = Observer.registered_names()
    ours = (n for n in names if _module_of(n).startswith("steelyard."))
    return sorted(ours)


def _module_of(name: str) -> str:
    from steelyard.observers import Observer

    return str(Observer.get_value_from_registry(name).__module__)


def test_every_observer_has_a_section_with_formula_picture_and_options() -> None:
    """A section that is generated has no formula and no picture; see tools/observer_docs.py."""
    from steelyard.observers import Observer

    written = page("observers")
    text = load_tool("observer_docs").complete(written)
    listed = [re.sub(r"\[`(\w+)`\].*", r"\1", row[0]) for row in table(text, "observer")]
    assert sorted(listed) == our_observers()
    for name in our_observers():
        body = section(text, f"### `{name}`")
        if f"### `{name}`\n" in written:
            assert "```text" in body, f"{name} has no formula"
            assert f"(pictures/{name}.svg)" in body, f"{name} has no picture"
        declared = Observer.get_value_from_registry(name).Options().model_dump()
        if not declared:
            assert "It has no options" in body or "no options" in body
            continue
        stated = {bare(option): default for option, default, _ in table(body, "option")}
        assert stated == {option: str(default) for option, default in declared.items()}, name


def test_costs_of_observers_are_those_that_were_measured() -> None:
    cases = {
        r["case"]: 1000 * r["cpu"]
        for r in result("speed")["results"]
        if r["dtype"] == "bf16" and r["threads"] == 1
    }
    measured = {
        ("memoryless_minmax", 1): "min-max, group 128",
        ("memoryless_minmax", 2): "min-max, group 16 (NVFP4)",
        ("memoryless_mse", 1): "MSE int4 group 128, norm 2.4",
        ("memoryless_mse", 2): "MSE NVFP4",
        ("imatrix_mse", 1): "importance int4 group 128",
        ("optimal", 1): "optimal int4 group 128, norm 2, beside the peer's 20-step MSE",
        ("nvfp4_expanded_mse", 2): "range-expanded NVFP4 search, 112 steps",
    }
    rows = table(section(page("observers"), "## One by one"), "observer")
    stated = {(bare(row[0]), i): row[i] for row in rows for i in (1, 2) if row[i]}
    assert set(stated) == set(measured)
    for key, shown in stated.items():
        assert float(shown) == pytest.approx(cases[measured[key]], rel=0.03), key
    _check_estimates(
        {name: cases[case] for (name, _), case in measured.items() if "min" not in case}
    )


def _check_estimates(milliseconds: dict[str, float]) -> None:
    """Hold what observers declare for the plan to the measurements, within a factor of two."""
    from steelyard.observers import Observer

    for name, measured in milliseconds.items():
        declared = 1000 * 4096**2 * Observer.get_value_from_registry(name).seconds_per_weight
        assert measured / 2 < declared < measured * 2, (name, declared, measured)


# -- choosing ---------------------------------------------------------------------------------


def test_divergences_are_those_that_were_measured() -> None:
    columns = [
        "memoryless_minmax",
        "memoryless_mse",
        "optimal",
        "imatrix_mse",
        "optimal with importance",
    ]
    rows = table(page("choosing"), "model | weights | `memoryless_minmax`")
    seen = set()
    for model, weights, *numbers in rows:
        found = result(f"quality-{model}")["results"]
        measured = {r["row"]: r["kl"] for r in found if r["format"] == weights}
        assert numbers == [f"{measured[column]:.4f}" for column in columns], (model, weights)
        assert min(numbers) == numbers[-1], "the page says that importance wins every row"
        seen.add((model, weights))
    everything = {
        (model, r["format"])
        for model in ("stories15m", "smollm2")
        for r in result(f"quality-{model}")["results"]
    }
    assert seen == everything, "no row may be left out"


def test_gptq_and_streaming_are_those_that_were_measured() -> None:
    text = page("choosing")
    rows = table(section(text, "## Rounding with GPTQ"), "model")
    assert len(rows) == 2
    for model, scheme, importance, gptq in rows:
        stated = result(f"gptq-{model}")
        size = re.search(r"\d+", scheme.split(",")[1])
        assert size is not None and str(size[0]) in json.dumps(stated)
        numbers = {f"{kl:.4f}" for kl in _numbers_called(stated, "kl")}
        assert {importance, gptq} <= numbers, model
        assert float(gptq) < float(importance)
    streamed = json.dumps(result("streaming-llama"))
    rows = table(section(text, "## Time without data"), "scheme, observer")
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for case, seconds, ratio in rows:
        row = next(r for r in table(readme, "case | wall, s | GB/s") if r[0] == case)
        assert seconds == f"{float(row[1]):.0f}" and ratio == row[5], case
        assert case.split(",")[0] in streamed


def test_experts_load_as_the_page_says() -> None:
    results = result("expert-loading")["results"]
    assert {r["result"] for r in results} <= {"ok", "refused"}, "nothing else may be published"
    quantized = [
        r for r in results if r["result"] == "ok" and r["scheme"] not in ("bf16", "the rest")
    ]
    families = {r["family"] for r in quantized}
    text = " ".join(section(page("experts"), "## Names and limits").split())
    assert f"small models of {len(families)} families in" in text
    for scheme in {r["scheme"] for r in quantized}:
        assert scheme in text, scheme


def _numbers_called(tree: Any, name: str) -> Iterator[float]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if isinstance(value, float) and key.lower().startswith(name):
                yield value
            else:
                yield from _numbers_called(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _numbers_called(value, name)


# -- formats ----------------------------------------------------------------------------------

OUT, IN = 384, 256
SIZES = {"BF16": 16, "F32": 32, "F8_E4M3": 8, "I8": 8, "U8": 8, "I32": 32, "I64": 64}
BYTES = {"num_bits": 8, "strategy": "channel"}
STATIC = {"num_bits": 8, "strategy": "tensor"}
IN_FULL = {
    "W8A8, static": STATIC,
    "W8A8, static and asymmetric": {**STATIC, "symmetric": False},
}


def format_rows() -> list[tuple[str, list[str]]]:
    """Return each scheme with the row of the table that it stands in."""
    rows = []
    for row in table(page("formats"), "scheme"):
        label = bare(row[0])
        names = [label] if label in IN_FULL else label.split(", ")
        rows += [(name, row) for name in names]
    return rows


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=IN,
        intermediate_size=OUT,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def header_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Read a safetensors header by hand."""
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return dict(json.loads(content[8 : 8 + length]))


@pytest.mark.parametrize(("scheme", "row"), format_rows(), ids=lambda value: str(value)[:30])
def test_formats_are_what_is_written(
    scheme: str, row: list[str], small: Path, tmp_path: Path
) -> None:
    from steelyard import oneshot
    from steelyard.modifiers import QuantizationModifier
    from steelyard.recipes import load_recipe

    inputs = IN_FULL.get(scheme)
    groups = {"group_0": {"targets": ["Linear"], "weights": BYTES, "input_activations": inputs}}
    how: dict[str, Any] = {"scheme": scheme} if inputs is None else {"config_groups": groups}
    recipe = QuantizationModifier(ignore=["lm_head"], **how)
    data = [list(range(48))] if load_recipe(recipe).needs_data else None
    oneshot(small, recipe, dataset=data, output_dir=tmp_path / "out")
    written = {
        name.rpartition(".")[2]: (info["dtype"], info["shape"])
        for name, info in header_of(tmp_path / "out").items()
        if name.startswith("model.layers.0.mlp.gate_proj.")
    }
    stated = {
        name: (dtype, [_size(part) for part in shape.split(", ")])
        for name, dtype, shape in re.findall(r"`(\w+)` (\w+) `\[([^\]]+)\]`", row[2])
    }
    assert written == stated
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == row[1]
    per_weight = sum(  # of what grows with the columns; blocks of scales hardly count
        SIZES[dtype] * shape[0] * shape[1]
        for dtype, shape in written.values()
        if len(shape) == 2 and shape[1] > 1
    )
    assert float(row[3]) == pytest.approx(per_weight / (OUT * IN), abs=0.001)


def _size(words: str) -> int:
    """Work out `in*3/32` and the like."""
    value = {"out": OUT, "in": IN}.get(words.split("*")[0].split("/")[0])
    if value is None:
        return int(words)
    for sign, number in re.findall(r"([*/])(\d+)", words):
        value = value * int(number) if sign == "*" else value // int(number)
    return value


def test_the_cache_is_stored_as_stated(small: Path, tmp_path: Path) -> None:
    from steelyard import oneshot
    from steelyard.modifiers import QuantizationModifier

    recipe = QuantizationModifier(
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}
    )
    oneshot(small, recipe, dataset=[list(range(48))], output_dir=tmp_path / "out")
    header = header_of(tmp_path / "out")
    text = page("formats")
    for name in ("self_attn.k_scale", "self_attn.v_scale"):
        assert f"`{name}`" in text
        info = header[f"model.layers.0.{name}"]
        assert (info["dtype"], info["shape"]) == ("BF16", [1])


# -- errors -----------------------------------------------------------------------------------


def sentences() -> list[str]:
    """Return every text in the source, with `…` for what is filled in."""
    found = []
    for path in (ROOT / "src" / "steelyard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(_shown(part) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [re.sub("…+", "…", " ".join(text.split())) for text in found]


def _shown(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "…"


def quoted_messages() -> list[str]:
    rows = re.findall(r"^\| (`+)(.+?)\1 \| ", page("troubleshooting"), re.MULTILINE)
    return [message for _, message in rows]


def test_quoted_messages_are_in_the_source() -> None:
    known = sentences()
    quoted = quoted_messages()
    assert len(quoted) > 50
    absent = [message for message in quoted if not any(message in text for text in known)]
    assert not absent, "\n".join(absent)
    assert "the recipe does not fit the model, and nothing was done:" in " ".join(known)


def test_every_error_is_mentioned() -> None:
    from steelyard import errors

    classes = [name for name in errors.__all__ if name[0].isupper()]
    text = page("troubleshooting")
    assert [name for name in classes if f"`{name}`" not in text and name != "SteelyardError"] == []


# -- llm-compressor ---------------------------------------------------------------------------


def test_paths_of_imports_exist() -> None:
    rows = table(page("moving-from-llm-compressor"), "imported there from")
    assert len(rows) > 5
    for there, here in rows:
        statement = bare(here)
        assert f"from {bare(there).replace('llmcompressor', 'steelyard')} import" in statement
        exec(compile(statement, "moving", "exec"), {})


def test_table_of_datasets_is_that_of_the_code() -> None:
    from steelyard.data.known_datasets import KNOWN

    rows = {bare(row[0]): row for row in table(page("oneshot"), "name")}
    assert rows.keys() == KNOWN.keys()
    for name, known in KNOWN.items():
        _, hub, split, columns = rows[name]
        assert bare(hub) == known.hub
        assert split.split(", ") == [known.split, *([known.config] if known.config else [])]
        used = re.findall(r"{(\w+)}", known.template or "") or [
            *(known.chat or ())[:1],
            *(known.image or known.audio or ()),
        ]
        assert re.findall(r"`(\w+)`", columns) == (used or ["text"])


def test_table_of_arguments_is_that_of_the_signature() -> None:
    """Every argument of llm-compressor has one row, and those without effect say so."""
    from llm_compressor_names import ONESHOT

    from steelyard import oneshot
    from steelyard.engine.idle_options import IDLE

    rows = table(page("moving-from-llm-compressor"), "argument")
    listed = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert sorted(listed) == sorted(ONESHOT)
    assert sum(len(re.findall(r"`(\w+)`", row[0])) for row in rows) == len(listed)
    assert set(listed) <= set(inspect.signature(oneshot).parameters)
    assert {name for name, text in listed.items() if text.startswith("no effect")} == set(IDLE)


def test_scripts_differ_in_their_import_root_alone() -> None:
    """Everything that the page imports from here is imported by a path that is also there."""
    text = page("moving-from-llm-compressor")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    listed = {bare(row[0]) for row in table(text, "imported there from")}
    imported = re.findall(r"^from (steelyard[\w.]*) import", "\n".join(blocks), re.MULTILINE)
    assert len(imported) >= 3
    for name in imported:
        assert name.replace("steelyard", "llmcompressor") in listed
