"""The paths by which scripts for llm-compressor import modifiers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from steelyard import modifiers
from steelyard.aliases import ALIASES


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


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="QuIPModifier"):
        import_module("steelyard.modifiers.quantization").QuIPModifier  # noqa: B018
