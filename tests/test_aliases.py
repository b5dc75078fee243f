"""The paths by which scripts for llm-compressor import modifiers."""

from __future__ import annotations

from importlib import import_module

import pytest

from steelyard import modifiers


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("modifiers.quantization", "QuantizationModifier"),
        ("modifiers.quantization", "GPTQModifier"),
        ("modifiers.quantization.gptq", "GPTQModifier"),
        ("modifiers.gptq", "GPTQModifier"),
        ("modifiers.transform.imatrix", "IMatrixGatherer"),
    ],
)
def test_path_leads_to_the_class(path: str, name: str) -> None:
    module = import_module(f"steelyard.{path}")
    assert getattr(module, name) is getattr(modifiers, name)
    assert name in module.__all__


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="AWQModifier"):
        import_module("steelyard.modifiers.quantization").AWQModifier  # noqa: B018
