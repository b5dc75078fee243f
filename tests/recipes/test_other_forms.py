"""Recipes as llm-compressor's users have them: several, in stages, and written by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from steelyard.recipe import Recipe

from steelyard.errors import RecipeError
from steelyard.modifiers import GPTQModifier, Modifier, QuantizationModifier
from steelyard.modifiers.not_implemented import NOT_IMPLEMENTED
from steelyard.recipes import load_recipe

WRITTEN = """
default_stage:
  default_modifiers:
    GPTQModifier:
      targets: [Linear]
      ignore: [lm_head]
      scheme: W4A16
      bypass_divisibility_checks: false
      requires_calibration_data: true
      block_size: 64
      dampening_frac: 0.02
      actorder: static
      batched_quantization: auto
"""
TAG = "!!python/object/apply:compressed_tensors.quantization.quant_args.QuantizationStrategy"
WITH_CHOICES = f"""
default_stage:
  default_modifiers:
    QuantizationModifier:
      config_groups:
        g:
          targets: [Linear]
          weights: {{num_bits: 8, type: float, strategy: tensor, dynamic: false}}
          input_activations:
            num_bits: 8
            type: float
            strategy: {TAG} [
              tensor]
          output_activations: null
          format: null
      requires_calibration_data: true
"""
ONE = "first_stage: {quantization_modifiers: {QuantizationModifier: {scheme: W8A8}}}"
TWO = "second_stage: {quantization_modifiers: {GPTQModifier: {scheme: W4A16}}}"


def kinds(recipe: Any, stage: str | None = None) -> list[tuple[str, Any]]:
    return [(type(m).__name__, m.scheme) for m in load_recipe(recipe, stage).modifiers]  # type: ignore[attr-defined]


def test_recipe_that_llm_compressor_wrote() -> None:
    (made,) = load_recipe(WRITTEN).modifiers
    options = {"ignore": ["lm_head"], "scheme": "W4A16", "block_size": 64, "dampening_frac": 0.02}
    assert made == GPTQModifier(**options)


def test_choices_that_it_writes_as_python_objects() -> None:
    (made,) = load_recipe(WITH_CHOICES).modifiers
    config = made.quantization_config()
    assert config is not None and config.config_groups["g"].input_activations is not None
    assert config.config_groups["g"].input_activations.strategy == "tensor"


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system [tensor]",
        f"{TAG} [tensor, channel]",
        f"{TAG} [[tensor]]",
        f"{TAG} {{a: tensor}}",
    ],
)
def test_other_python_objects_are_refused(value: str) -> None:
    text = f"modifiers: {{QuantizationModifier: {{scheme: {value}}}}}"
    with pytest.raises(RecipeError, match=r"the tag .* is not allowed"):
        load_recipe(text)


def test_stages_are_applied_in_order_or_chosen() -> None:
    both = f"{ONE}\n{TWO}\n"
    assert kinds(both) == [("QuantizationModifier", "W8A8"), ("GPTQModifier", "W4A16")]
    assert kinds(both, "second") == [("GPTQModifier", "W4A16")]
    assert kinds(load_recipe(both, "second").text) == [("GPTQModifier", "W4A16")]
    numbered = both.replace("first_stage", "a_stage_0").replace("second_stage", "a_stage_1")
    assert kinds(numbered) == kinds(both)
    with pytest.raises(RecipeError, match="no stage 'thrid'"):
        load_recipe(both, "thrid")


def test_several_recipes_in_a_list(tmp_path: Path) -> None:
    expected = [("QuantizationModifier", "W8A8"), ("GPTQModifier", "W4A16")]
    (tmp_path / "one.yaml").write_text(ONE)
    (tmp_path / "two.yaml").write_text(TWO)
    files = [str(tmp_path / "one.yaml"), tmp_path / "two.yaml"]
    assert kinds(files) == expected
    assert kinds(load_recipe(files).text) == expected
    modifiers = [QuantizationModifier(scheme="W8A8"), GPTQModifier(scheme="W4A16")]
    assert kinds([ONE, modifiers[1:]]) == expected  # text, and a list in the list
    assert kinds([Recipe.from_modifiers(modifiers[0]), Recipe(modifiers[1:])]) == expected
    with pytest.raises(RecipeError, match="there is no recipe file"):
        load_recipe([str(tmp_path / "one.yaml"), str(tmp_path / "three.yaml")])


def test_recipe_objects(tmp_path: Path) -> None:
    made = Recipe.create_instance(f"{ONE}\n{TWO}\n", target_stage="first")
    assert [type(m).__name__ for m in made.modifiers] == ["QuantizationModifier"]
    text = Recipe(made.modifiers).yaml(tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")).modifiers == made.modifiers
    assert load_recipe(text).modifiers == made.modifiers


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text('{"modifiers": {"QuantizationModifier": {"scheme": "W8A8"}}}')
    assert kinds(str(path)) == [("QuantizationModifier", "W8A8")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GTPQModifier", "did you mean 'GPTQModifier'"),
        ("QuantisationModifier", "did you mean 'QuantizationModifier'"),
        ("gptq", "did you mean 'GPTQModifier'"),
        ("QuarotModifier", "known"),
        ("SparsificationModifier", "known"),
        ("MagnitudePruningModifer", "MagnitudePruningModifier is not implemented"),
    ],
)
def test_suggestion_is_a_misspelling_and_nothing_else(name: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({name: {}})
    assert said in str(caught.value)


@pytest.mark.parametrize("name", NOT_IMPLEMENTED)
def test_misspelt_names_of_llm_compressor_never_become_another(name: str) -> None:
    if name in Modifier.registry:
        return
    wrong = name.replace("Modifier", "Modifer")
    with pytest.raises(RecipeError) as caught:
        load_recipe({wrong: {}})
    assert f"did you mean {name!r}" in str(caught.value)
