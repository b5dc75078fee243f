"""ls, and the names that are completed: what the registries hold."""

from __future__ import annotations

import pytest
from commands import Command
from compressed_tensors.quantization import QuantizationStrategy, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from steelyard import names
from steelyard.cli import known
from steelyard.cli.known import one_of
from steelyard.cli.recipe import recipe_from
from steelyard.engine import run_options
from steelyard.modifiers import QuantizationModifier
from steelyard.observers import Observer, StaticMinMaxObserver
from steelyard.recipes import load_recipe


def test_names_are_those_of_the_registries() -> None:
    ours = {n for n in Observer.registered_names() if _is_ours(n)}
    assert {n for group in names.observer_modules().values() for n in group} == ours
    assert set(names._presets_in_source()) == {*PRESET_SCHEMES}
    assert names.scheme_names() == sorted({*PRESET_SCHEMES} - {"UNQUANTIZED"})
    assert known.PIPELINES == run_options.PIPELINES
    assert known.UNCALIBRATED == run_options.UNCALIBRATED
    assert known.UNCALIBRATABLE == run_options.UNCALIBRATABLE


def _is_ours(name: str) -> bool:
    return Observer.get_value_from_registry(name).__module__.startswith("steelyard.")


def test_every_preset_is_accepted(steelyard: Command) -> None:
    """From compressed-tensors' own registry: a preset that is new there needs no change here."""
    for name in {*PRESET_SCHEMES} - {"UNQUANTIZED"}:
        made = recipe_from(one_of("scheme", name.lower(), names.scheme_names()), None)
        expected = preset_name_to_scheme(name, ["Linear"]).weights
        assert made.config.config_groups["group_0"].weights.num_bits == expected.num_bits


def test_names_of_plug_ins_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(StaticMinMaxObserver):
        """A user's observer."""

    monkeypatch.setattr(Observer.registry, "_entries", dict(Observer.registry._entries))
    monkeypatch.setitem(PRESET_SCHEMES, "W4_MINE", PRESET_SCHEMES["W4A16"])
    Observer.register("mine")(Mine)
    assert "mine" in names.observer_names() and "W4_MINE" in names.scheme_names()
    assert one_of("observer", "Mine", names.observer_names()) == "mine"
    made = recipe_from("W4_MINE", None, observer="mine")
    assert made.config.config_groups["group_0"].weights.observer == "mine"


def test_lists(steelyard: Command) -> None:
    found = steelyard("ls", "--json").document
    assert found["observers"] == Observer.registry.describe()
    assert set(found["schemes"]) == {*PRESET_SCHEMES} - {"UNQUANTIZED"}
    assert set(found["strategies"]) == {s.value for s in QuantizationStrategy}
    for name, facts in found["schemes"].items():
        needs = load_recipe(QuantizationModifier(scheme=name)).needs_data
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
