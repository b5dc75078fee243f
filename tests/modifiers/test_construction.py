"""A modifier that is constructed in Python refuses options in the words of a recipe in YAML."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from steelyard.errors import RecipeError, SteelyardError
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
from steelyard.recipes import load_recipe

WRONG: list[tuple[Any, dict[str, Any]]] = [
    (QuantizationModifier, {"scheme": "W4A61"}),
    (QuantizationModifier, {"scheme": "W4A16", "ignroe": ["lm_head"]}),
    (QuantizationModifier, {"scheme": "W4A16", "weight_observer": "optimum"}),
    (QuantizationModifier, {"scheme": "W4A16", "ignore": [3]}),
    (QuantizationModifier, {}),
    (QuantizationModifier, {"config_groups": {"g": {"targets": ["Linear"], "weights": 4}}}),
    (GPTQModifier, {"scheme": "W4A16", "block_size": 0}),
    (GPTQModifier, {"scheme": "W4A16", "actorder": "sideways"}),
    (IMatrixGatherer, {"save_to": 3}),
]


@pytest.mark.parametrize(("modifier", "options"), WRONG)
def test_a_wrong_option_is_a_recipe_error_in_the_words_of_yaml(
    modifier: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError) as in_python:
        modifier(**options)
    with pytest.raises(RecipeError) as in_yaml:
        load_recipe({modifier.__name__: options})
    assert str(in_python.value) == str(in_yaml.value)
    assert str(in_python.value).startswith(modifier.__name__)
    assert isinstance(in_python.value, SteelyardError) and isinstance(in_python.value, ValueError)
    assert in_python.value.__cause__ is None


def test_an_argument_without_a_name_is_refused() -> None:
    with pytest.raises(RecipeError, match="QuantizationModifier"):
        QuantizationModifier("W4A16")


def test_a_modifier_is_copied_and_pickled() -> None:
    made = GPTQModifier(scheme="W4A16", ignore=["lm_head"])
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
