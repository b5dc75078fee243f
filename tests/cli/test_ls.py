"""ls, and the names that are completed: what the registries hold."""

from __future__ import annotations

import sys

import pytest
from commands import Command
from compressed_tensors.quantization import QuantizationStrategy
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from steelyard.cli import known
from steelyard.engine import oneshot as module
from steelyard.modifiers import QuantizationModifier
from steelyard.observers import Observer


def test_names_are_those_of_the_registries() -> None:
    ours = {n for n in Observer.registered_names() if _is_ours(n)}
    assert set(known.OBSERVERS) == ours
    assert {*PRESET_SCHEMES} - {"UNQUANTIZED"} <= set(known.SCHEMES)
    assert list(known.SCHEMES) == sorted(known.SCHEMES)
    here = sys.modules[module.__module__] if callable(module) else module
    assert known.PIPELINES == here.PIPELINES
    assert known.UNCALIBRATED == here.UNCALIBRATED


def _is_ours(name: str) -> bool:
    return Observer.get_value_from_registry(name).__module__.startswith("steelyard.")


def test_lists(steelyard: Command) -> None:
    found = steelyard("ls", "--json").document
    assert found["observers"] == Observer.registry.describe()
    assert set(found["schemes"]) == {*PRESET_SCHEMES} - {"UNQUANTIZED"}
    assert set(found["strategies"]) == {s.value for s in QuantizationStrategy}
    for name, facts in found["schemes"].items():
        needs = QuantizationModifier(scheme=name).needs_data
        assert facts["needs_data"] is needs, name
    schemes = found["schemes"]
    assert schemes["W4A16_ASYM"]["weights"] == "int4 asymmetric group 128"
    assert schemes["FP8_BLOCK"]["weights"] == "fp8 block 128x128"
    assert schemes["NVFP4"]["activations"] == "nvfp4, dynamic, static global scale"
    assert schemes["MXFP8"]["weights"] == "mxfp8"
    assert schemes["W8A16"]["activations"] == "not quantized"


@pytest.mark.parametrize("kind", ["observers", "schemes", "strategies"])
def test_one_list(kind: str, steelyard: Command) -> None:
    document = steelyard("ls", kind, "--json").document
    assert set(document) == {"schema", "command", kind}
    lines = steelyard("ls", kind).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(document[kind])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("steelyard quantize --scheme NVF", ["NVFP4", "NVFP4A16"]),
        ("steelyard quantize --observer mem", ["memoryless_minmax", "memoryless_mse"]),
        ("steelyard compare --observers mse,opt", ["mse,optimal"]),
        ("steelyard ls s", ["schemes", "strategies"]),
        ("steelyard va", ["validate"]),
    ],
)
def test_completion(words: str, expected: list[str], process: Command) -> None:
    environment = {
        "_STEELYARD_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    answer = process(**environment)
    assert answer.out.split() == expected
    assert answer.err == ""
