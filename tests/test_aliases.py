"""The paths by which scripts for llm-compressor import modifiers."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
from llm_compressor_names import NAMES

from steelyard import modifiers, script_tools
from steelyard.aliases import ALIASES, FORWARDED
from steelyard.modifiers.not_implemented import NOT_IMPLEMENTED


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("modifiers.quantization", "QuantizationModifier"),
        ("modifiers.quantization", "GPTQModifier"),
        ("modifiers.quantization.gptq", "GPTQModifier"),
        ("modifiers.gptq", "GPTQModifier"),
        ("modifiers.transform.imatrix", "IMatrixGatherer"),
        ("modifiers.smoothquant", "SmoothQuantModifier"),
        ("modifiers.transform.smoothquant", "SmoothQuantModifier"),
        ("modifiers.logarithmic_equalization", "LogarithmicEqualizationModifier"),
        ("modifiers.awq", "AWQModifier"),
        ("modifiers.transform.awq", "AWQModifier"),
    ],
)
def test_path_leads_to_the_class(path: str, name: str) -> None:
    module = import_module(f"steelyard.{path}")
    assert getattr(module, name) is getattr(modifiers, name)
    assert name in module.__all__


@pytest.mark.parametrize("path", ALIASES)
def test_both_forms_of_import_give_the_module(path: str) -> None:
    parent, _, leaf = path.rpartition(".")
    found: dict[str, Any] = {}
    exec(f"from {parent} import {leaf} as by_from\nimport {path} as by_path", found)
    assert found["by_from"] is found["by_path"] is import_module(ALIASES[path])


@pytest.mark.parametrize("path", FORWARDED)
def test_paths_with_parts_have_the_names_of_their_module(path: str) -> None:
    parent, _, leaf = path.rpartition(".")
    target = import_module(FORWARDED[path])
    module = import_module(path)
    for name in target.__all__:
        assert getattr(module, name) is getattr(target, name)
    if not hasattr(import_module(parent), leaf):
        raise AssertionError(f"{parent} has no {leaf}")


def test_function_stays_when_a_module_of_its_name_is_imported() -> None:
    exec("import steelyard.entrypoints.oneshot")
    from steelyard import entry, entrypoints  # type: ignore[attr-defined]

    assert entrypoints.oneshot is entry.oneshot is import_module("steelyard").oneshot


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_names_of_scripts_are_there_or_say_what_to_use(module: str, name: str) -> None:
    path = f"steelyard.{module}".rstrip(".")
    found: dict[str, Any] = {}
    try:
        exec(f"from {path} import {name}", found)
    except ImportError as error:
        told = {**script_tools.MISSING, **NOT_IMPLEMENTED}
        assert name in str(error) and told[name] in str(error)
    else:
        assert name not in NOT_IMPLEMENTED and name not in script_tools.MISSING
        assert found[name] is getattr(import_module(path), name)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("steelyard.modifiers.pruning.reap", "holds all modifiers"),
        ("steelyard.utils.helpers", "compressed-tensors"),
        ("steelyard.modeling.kimi_k3", "model classes of transformers"),
        ("steelyard.pipelines.sequential", "pipeline="),
    ],
)
def test_modules_that_are_not_there_say_what_to_use(path: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=said):
        import_module(path)


def test_other_names_are_not_there() -> None:
    with pytest.raises(ImportError, match="SparseGPTModifier is not implemented yet; use llm-comp"):
        import_module("steelyard.modifiers.quantization").SparseGPTModifier  # noqa: B018
    with pytest.raises(AttributeError, match="NoModifier"):
        import_module("steelyard.modifiers.quantization").NoModifier  # noqa: B018


def test_file_comes_before_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "steelyard.words", "steelyard.foreign")
    monkeypatch.delitem(sys.modules, "steelyard.words", raising=False)
    assert import_module("steelyard.words").__name__ == "steelyard.words"
