"""All that is wrong with a recipe is told at once: where, what was got, what is meant."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import RecipeError
from steelyard.modifiers import QuantizationModifier
from steelyard.modifiers.not_implemented import NOT_IMPLEMENTED
from steelyard.recipes import load_recipe
from steelyard.recipes.recipe_forms import modifier_names

BASE = "quantization_stage.quantization_modifiers.QuantizationModifier"
WRONG = """\
quantization_stage:
  quantization_modifiers:
    QuantizationModifier:
      targts: [Linear]
      ignore: [lm_head, 3]
      config_groups:
        group_0:
          targets: [Linear]
          weights:
            num_bits: four
            strategy: chanel
            observer: memoryless_msee
        group_1:
          weights:
            num_bit: 4
          input_activations:
            num_bits: 8
            observer: mse
            observer_kwargs:
              maxshrnk: 0.1
              norm: -2.0
      weight_observer:
        name: mse
        grid: none
"""


def refusal(recipe: Any) -> list[str]:
    """Return the lines of the error that a recipe is refused with."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value).splitlines()


def test_all_problems_with_file_line_path_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(WRONG)
    groups = f"{BASE}.config_groups"
    expected = [
        (4, f"{BASE}.targts", "'targts': did you mean 'targets'"),
        (5, f"{BASE}.ignore[1]", "must be text, got 3"),
        (10, f"{groups}.group_0.weights.num_bits", "must be a whole number, got 'four'"),
        (11, f"{groups}.group_0.weights.strategy", "'chanel': did you mean 'channel'"),
        (12, f"{groups}.group_0.weights.observer", "did you mean 'memoryless_mse'"),
        (13, f"{groups}.group_1.targets", "is missing"),
        (15, f"{groups}.group_1.weights.num_bit", "did you mean 'num_bits'"),
        (20, f"{groups}.group_1.input_activations.observer_kwargs.maxshrnk", "'maxshrink'"),
        (21, f"{groups}.group_1.input_activations.observer_kwargs.norm", "more than 0.0, got -2.0"),
        (24, f"{BASE}.weight_observer.grid", "must be a number, got 'none'"),
    ]
    lines = refusal(path)
    for (line, where, what), told in zip(expected, lines, strict=True):
        assert told.startswith(f"{path}:{line}: {where}: ")
        assert what in told


def test_python_recipes_have_paths_without_lines() -> None:
    told = refusal([{"QuantizationModifier": {"scheme": "W4A15"}}])
    assert told == [
        "[0].QuantizationModifier.scheme: there is no scheme 'W4A15': did you mean 'W4A16'?"
    ]


@pytest.mark.parametrize(
    ("options", "where", "what"),
    [
        ("{scheme: 4}", "scheme", "got 4"),
        ("{scheme: {W4A16: 3}}", "scheme.W4A16", "must be a list, got 3"),
        ("{scheme: W4A16, targets: 3}", "targets", "must be a list, got 3"),
        ("{scheme: W8A8, bypass_divisibility_checks: 1}", "bypass_divisibility_checks", "got 1"),
        ("{kv_cache_scheme: {num_bits: '8'}}", "kv_cache_scheme.num_bits", "got '8'"),
        ("{kv_cache_scheme: {num_bits: true}}", "kv_cache_scheme.num_bits", "got True"),
        ("{kv_cache_scheme: {observer: msee}}", "kv_cache_scheme.observer", "'mse'"),
        ("{kv_cache_scheme: {group_size: ab}}", "kv_cache_scheme.group_size", "got 'ab'"),
        ("{kv_cache_scheme: {type: flot}}", "kv_cache_scheme.type", "'float'"),
        ("{kv_cache_scheme: {scale_dtype: bf}}", "kv_cache_scheme.scale_dtype", "bf"),
        ("{kv_cache_scheme: {strategy: block}}", "kv_cache_scheme", "block structure"),
        ("{kv_cache_scheme: 8}", "kv_cache_scheme", "must be a mapping, got 8"),
        ("{scheme: W4A16, weight_observer: mmse}", "weight_observer", "did you mean 'mse'"),
        ("{scheme: W4A16, observer: {inpt: mse}}", "observer", "did you mean 'input'"),
        (
            "{scheme: W4A16, observer: {input: {name: mse, options: {grd: 1.0}}}}",
            "observer.input.options.grd",
            "did you mean 'grid'",
        ),
        (
            "{config_groups: {g: {targets: [Linear], weights: {num_bits: 5, type: float}}}}",
            "config_groups.g.weights",
            "num_bits",
        ),
        ("{scheme: W8A8, targets: 're:(['}", "targets", "'re:([' is not a regular expression"),
        ("{scheme: W8A8, targets: ['re:([']}", "targets[0]", "unterminated character set"),
        ("{scheme: W8A8, ignore: [lm_head, 're:*']}", "ignore[1]", "nothing to repeat"),
        ("{scheme: {W8A8: ['re:(']}}", "scheme.W8A8[0]", "'re:(' is not a regular expression"),
        (
            "{config_groups: {g: {targets: [a, 're:(']}}}",
            "config_groups.g.targets[1]",
            "'re:(' is not a regular expression",
        ),
        ("{kv_cache_scheme: {num_bits: 99}}", "kv_cache_scheme.num_bits", "2 to 8 bits"),
        ("{kv_cache_scheme: {num_bits: -4}}", "kv_cache_scheme.num_bits", "got -4"),
        (
            "{config_groups: {g: {targets: [a], weights: {num_bits: 1}}}}",
            "config_groups.g.weights.num_bits",
            "2 to 8 bits",
        ),
        (
            "{config_groups: {g: {targets: [a], input_activations: {num_bits: 9, dynamic: true}}}}",
            "config_groups.g.input_activations.num_bits",
            "2 to 8 bits",
        ),
        (
            "{config_groups: {a: {targets: [Linear]}, b: {targets: ['re:x', Linear]}}}",
            "config_groups",
            "'a' and 'b' both target 'Linear'",
        ),
        ("{scheme: {W8A8: [a], FP8: [a]}}", "scheme", "'W8A8' and 'FP8' both target 'a'"),
    ],
)
def test_one_problem(options: str, where: str, what: str) -> None:
    (told,) = refusal(f"modifiers:\n  QuantizationModifier: {options}\n")
    assert told.startswith(f"recipe:2: modifiers.QuantizationModifier.{where}: ")
    assert what in told


@pytest.mark.parametrize("options", ["{}", "{scheme: W4A16, config_groups: {}}"])
def test_problems_of_the_whole_stand_at_the_modifier(options: str) -> None:
    (told,) = refusal(f"modifiers:\n  QuantizationModifier: {options}\n")
    assert re.match(r"recipe:2: modifiers\.QuantizationModifier: give .*config_groups", told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("{targets: [a], scheme: {W8A8: [b]}}", "targets needs a single preset"),
        ("{targets: [a], config_groups: {g: {targets: [b]}}}", "into the config_groups"),
        ("{targets: [a], kv_cache_scheme: {num_bits: 8}}", "kv_cache_scheme alone has none"),
        ("{scheme: FP8, observer: {input: mse}, input_observer: mse}", "observer.input and input_"),
        ("{scheme: FP8, observer: {input: mse}, activation_observer: mse}", "activation_observer"),
        ("{scheme: FP8, observer: {output: mse}, output_observer: mse}", "observer.output and"),
        ("{scheme: FP8, observer: {output: mse}, activation_observer: mse}", "activation_observer"),
        ("{scheme: FP8, observer: {weights: mse}, weight_observer: mse}", "observer.weights and"),
        ("{scheme: FP8, input_observer: mse, activation_observer: mse}", "input_observer and"),
        ("{scheme: FP8, output_observer: mse, activation_observer: mse}", "output_observer and"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(options: str, told: str) -> None:
    (line,) = refusal(f"modifiers:\n  QuantizationModifier: {options}\n")
    assert line.startswith("recipe:2: modifiers.QuantizationModifier: ")
    assert told in line


@pytest.mark.parametrize(
    "options",
    [
        "{targets: [Linear], config_groups: {g: {targets: [b]}}}",
        "{targets: Linear, scheme: {W8A8: [b]}}",
        "{scheme: FP8, observer: {input: mse}, weight_observer: mse, output_observer: mse}",
        "{config_groups: {g: {targets: [a, a], weights: {num_bits: 2}}}}",
    ],
)
def test_options_that_go_together(options: str) -> None:
    assert load_recipe(f"QuantizationModifier: {options}").modifiers


def test_what_stands_inside_is_told_beside_the_rest() -> None:
    text = """\
QuantizationModifier:
  targets: ['re:(']
  config_groups:
    a: {targets: [Linear, 're:*'], weights: {num_bits: 99, observer: msee}}
    b: {targets: [Linear], weights: {num_bits: 5, strategy: chanel}}
"""
    places = [line.split(": ")[1] for line in refusal(text)]
    groups = "QuantizationModifier.config_groups"
    assert sorted(places) == [
        f"{groups}.a.targets[1]",
        f"{groups}.a.weights.num_bits",
        f"{groups}.a.weights.observer",
        f"{groups}.b.weights.strategy",
        "QuantizationModifier.targets[0]",
    ]


def test_python_objects_are_refused_alike() -> None:
    for options, told in (
        ({"scheme": "FP8", "targets": ["re:(["]}, "not a regular expression"),
        ({"config_groups": {"g": {"targets": ["re:(["]}}}, r"g\.targets\[0\]"),
        ({"kv_cache_scheme": {"num_bits": 99}}, "2 to 8 bits"),
    ):
        with pytest.raises(ValueError, match=told):
            QuantizationModifier(**options)


def test_errors_that_hide_each_other_are_all_told() -> None:
    text = """\
QuantizationModifier:
  config_groups:
    a: {targets: [Linear], weights: {num_bits: 5, type: float}}
    b: {targets: [Linear], input_activations: {strategy: channel}}
    c: {targets: [Linear], weights: {group_size: x}}
"""
    places = [line.split(": ")[1] for line in refusal(text)]
    groups = "QuantizationModifier.config_groups"
    assert places == [f"{groups}.a.weights", f"{groups}.b", f"{groups}.c.weights.group_size"]


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("QuantizationModifer: {}", "did you mean 'QuantizationModifier'"),
        ("modifiers: {SparseAWQ: {}}", "known: .*QuantizationModifier"),
        ("modifiers: {QuantizationModifier: W4A16}", "are a mapping, got 'W4A16'"),
        ("modifiers: [QuantizationModifier]", r"write `QuantizationModifier: \{\}`"),
        ("modifiers: [{A: 1, B: 2}]", "one modifier per item"),
        ("modifiers: W4A16", "got 'W4A16'"),
        ("a_stage: {run_type: oneshot}", "unknown key 'run_type'"),
        ("a_stage: 3", "a stage is a mapping"),
        ("a_stage:", "got nothing"),
        ("modifiers:", "got nothing"),
        ("{}", "an empty mapping"),
        ("[]", "an empty list"),
        ("", "is empty"),
        ("# only a comment", "is empty"),
        ("hello", "got 'hello'"),
        ("W4A16", r'QuantizationModifier\(scheme="W4A16"\)'),
        (7, "got 7"),
        ([], "an empty list"),
        ([7], "got 7"),
        ({}, "an empty mapping"),
        (QuantizationModifier, r"is a class: call it"),
        ([QuantizationModifier], r"is a class: call it"),
        ({3: {}}, "unknown modifier 3"),
    ],
)
def test_what_is_no_recipe(recipe: Any, told: str) -> None:
    (line,) = refusal(recipe)
    assert re.search(told, line)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("QuantizationModifier", "from steelyard.modifiers import QuantizationModifier"),
        ("SparseGPTModifier", "SparseGPTModifier is not implemented yet; use llm-compressor"),
        ("OtherModifier", "steelyard has .*QuantizationModifier"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_modifiers_of_llm_compressor_name_the_import(name: str, remedy: str, as_list: bool) -> None:
    def module(body: dict[str, Any]) -> None:
        body["__module__"] = "llmcompressor.modifiers.quantization"

    theirs = types.new_class(name, exec_body=module)()
    (line,) = refusal([theirs] if as_list else theirs)
    assert f"{name} comes from llmcompressor.modifiers.quantization" in line
    assert re.search(remedy, line)


# -- files ------------------------------------------------------------------------------------


def test_files_that_cannot_be_recipes(tmp_path: Path) -> None:
    missing, folder, garbage, large = (
        tmp_path / name for name in ("d.yaml", "a.yaml", "b.yaml", "c.yaml")
    )
    folder.mkdir()
    garbage.write_bytes(bytes(range(256)))
    with large.open("wb") as file:
        file.truncate(2**30)
    told = {
        missing: "no recipe file",
        folder: "is a folder",
        garbage: "not text",
        large: "too large",
    }
    for path, what in told.items():
        (line,) = refusal(path)
        assert str(path) in line
        assert what in line


def test_a_name_that_no_file_can_have() -> None:
    (line,) = refusal("\0.yaml")
    assert "not the name of a file" in line


# -- YAML -------------------------------------------------------------------------------------


def test_keys_that_are_given_twice_are_refused_with_both_lines() -> None:
    text = "modifiers:\n  QuantizationModifier:\n    scheme: W4A16\n    scheme: W8A8\n"
    (line,) = refusal(text)
    assert line.startswith("recipe:3: modifiers.QuantizationModifier.scheme: ")
    assert "twice, on lines 3 and 4" in line


@pytest.mark.parametrize(
    "text",
    [
        "- !!python/object/apply:os.system [exit 1]",
        "- !!python/name:os.system",
        "modifiers: !!python/tuple [1]",
        "modifiers: !mine {}",
        "modifiers: !!binary aGVsbG8=",
        "modifiers: !!set {a, b}",
    ],
)
def test_tags_are_refused(text: str) -> None:
    (line, *_) = refusal(text)
    assert "is not allowed in a recipe" in line


def test_aliases_that_explode_are_refused_before_they_do() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    (line,) = refusal("\n".join(levels))
    assert "aliases repeat more than" in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("modifiers: &a [*a]", "refers to a value that contains it"),
        ("[" * 5000, "nested"),
        ("[" * 60 + "]" * 60, "nested"),
        ("a: 1\n---\nb: 2", "recipe:2: not YAML"),
        ("modifiers: [\n  a: b", "recipe:2: not YAML"),
        ("a: \0", "not YAML"),
        ("[a]: b", "a key must be text"),
        ("modifiers: !!int four", "'four' is not a int"),
        ("modifiers: {<<: 3}", "<< takes a mapping"),
    ],
)
def test_yaml_that_cannot_be_read(text: str, told: str) -> None:
    assert any(told in line for line in refusal(text))


def broken(text: str, edits: list[tuple[int, int, str]]) -> str:
    for at, length, new in edits:
        start = at % (len(text) + 1)
        text = text[:start] + new + text[start + length :]
    return text


PIECES = st.one_of(
    st.text(max_size=3),
    st.sampled_from(["\n", ": ", "- ", "&a ", "*a", "!!int ", "{", "]", "'", "|", "1e3", "<<: "]),
)
EDITS = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 12), PIECES), min_size=1, max_size=4
)
RIGHT = """\
quantization_stage:
  quantization_modifiers:
    IMatrixGatherer: {ignore: [lm_head]}
    QuantizationModifier:
      ignore: [lm_head]
      config_groups:
        group_0:
          targets: [Linear]
          weights: {num_bits: 4, type: int, strategy: group, group_size: 128, actorder: weight,
                    observer: mse, observer_kwargs: {maxshrink: 0.1, patience: 10}}
          input_activations: {num_bits: 8, type: float, dynamic: true, strategy: token}
      kv_cache_scheme: {num_bits: 8, scale_dtype: bfloat16, symmetric: true}
      weight_observer: {name: mse, grid: 20.0}
"""


@pytest.mark.parametrize("text", [RIGHT, WRONG], ids=["right", "wrong"])
@given(edits=EDITS)
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
def test_mutated_text_loads_or_is_a_recipe_error(text: str, edits: list[Any]) -> None:
    try:
        recipe = load_recipe(broken(text, edits))
    except RecipeError as error:
        assert str(error)
    else:
        assert recipe.modifiers


def test_the_text_that_is_mutated_is_right() -> None:
    assert len(load_recipe(RIGHT).modifiers) == 2


@pytest.mark.parametrize("name", NOT_IMPLEMENTED)
def test_modifiers_that_only_llm_compressor_has_are_said_to_be_missing(name: str) -> None:
    (line,) = refusal({name: {"scheme": "W4A16"}})
    assert f"{name} is not implemented yet; use " in line
    assert "did you mean" not in line
    assert name not in modifier_names()
