"""Every form of a recipe gives the same modifiers, and `text` gives them back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import RecipeError
from steelyard.modifiers import IMatrixGatherer, Modifier, QuantizationModifier
from steelyard.recipes import load_recipe

OPTIONS = {"scheme": "W4A16", "ignore": ["lm_head"], "weight_observer": "memoryless_mse"}
MODIFIER = QuantizationModifier(**OPTIONS)
STAGED = """\
quantization_stage:
  quantization_modifiers:
    QuantizationModifier:
      scheme: W4A16
      ignore: [lm_head]
      weight_observer: memoryless_mse
"""
FLAT = """\
- QuantizationModifier:
    scheme: W4A16
    ignore: lm_head
    weight_observer: {name: memoryless_mse}
"""
NAMED = """\
modifiers:
  QuantizationModifier: {scheme: W4A16, ignore: [lm_head], weight_observer: memoryless_mse}
"""
LISTED = """\
modifiers:
  - QuantizationModifier: {scheme: W4A16, ignore: [lm_head], weight_observer: memoryless_mse}
"""
MERGED = """\
quantization_stage:
  quantization_modifiers:
    QuantizationModifier:
      <<: {scheme: W8A8, ignore: [lm_head]}
      scheme: W4A16
      weight_observer: &observer memoryless_mse
"""
TEXTS = {"staged": STAGED, "flat": FLAT, "named": NAMED, "listed": LISTED, "merged": MERGED}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_and_files_keep_what_the_user_wrote(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    for form in (text, path, str(path)):
        recipe = load_recipe(form)
        assert recipe.modifiers == [MODIFIER]
        assert recipe.text == text


@pytest.mark.parametrize(
    "form",
    [
        MODIFIER,
        [MODIFIER],
        (MODIFIER,),
        {"QuantizationModifier": OPTIONS},
        [{"QuantizationModifier": OPTIONS}],
        {"modifiers": {"QuantizationModifier": OPTIONS}},
        {"modifiers": [MODIFIER]},
        {"my_stage": {"my_modifiers": {"QuantizationModifier": OPTIONS}}},
        {"my_stage": {"modifiers": [{"QuantizationModifier": OPTIONS}]}},
    ],
)
def test_python_forms_are_dumped_as_text(form: Any) -> None:
    recipe = load_recipe(form)
    assert recipe.modifiers == [MODIFIER]
    assert recipe.text.startswith("quantization_stage:\n  quantization_modifiers:\n")
    assert load_recipe(recipe.text).modifiers == [MODIFIER]


def test_objects_stay_the_same_objects() -> None:
    assert load_recipe([MODIFIER]).modifiers[0] is MODIFIER


def test_stages_and_modifiers_keep_their_order() -> None:
    text = """\
b_stage:
  b_modifiers:
    IMatrixGatherer:
    QuantizationModifier: {scheme: FP8}
a_stage:
  other_modifiers: {IMatrixGatherer: {ignore: []}}
  modifiers: [QuantizationModifier: {scheme: W8A8}]
"""
    kinds = [
        (type(modifier).__name__, getattr(modifier, "scheme", None))
        for modifier in load_recipe(text).modifiers
    ]
    assert kinds == [
        ("IMatrixGatherer", None),
        ("QuantizationModifier", "FP8"),
        ("IMatrixGatherer", None),
        ("QuantizationModifier", "W8A8"),
    ]


def test_one_modifier_may_come_twice() -> None:
    twice = [QuantizationModifier(scheme="W8A8"), QuantizationModifier(scheme="FP8")]
    assert load_recipe(load_recipe(twice).text).modifiers == twice


@pytest.mark.parametrize(
    ("form", "needs_data"),
    [
        (QuantizationModifier(scheme="W4A16"), False),
        (QuantizationModifier(scheme="FP8"), True),
        ([IMatrixGatherer(), QuantizationModifier(scheme="W4A16")], True),
        (QuantizationModifier(kv_cache_scheme={"num_bits": 8}), True),
        (QuantizationModifier(kv_cache_scheme={"num_bits": 8, "dynamic": True}), False),
    ],
)
def test_needs_data_if_any_modifier_does(form: Any, needs_data: bool) -> None:
    assert load_recipe(form).needs_data is needs_data


def test_numbers_of_yaml_1_2_are_numbers() -> None:
    text = "QuantizationModifier: {scheme: W8A8, weight_observer: {name: mse, norm: 2e0}}"
    (modifier,) = load_recipe(text).modifiers
    assert isinstance(modifier, QuantizationModifier)
    assert modifier.weight_observer is not None
    assert modifier.weight_observer.options == {"norm": 2.0}


# -- what was written down loads back ---------------------------------------------------------

WORDS = st.one_of(
    st.text(min_size=1, max_size=8),
    st.sampled_from(["yes", "null", "1e3", "0x1f", "2024-01-01", "re:.*k_proj$", "<<", "=", "~"]),
)
NUMBERS = st.floats(0.125, 8, width=16)


@st.composite
def args(draw: st.DrawFn) -> QuantizationArgs:
    kind, bits = draw(st.sampled_from([("int", 4), ("int", 8), ("float", 8), ("float", 4)]))
    stated: dict[str, Any] = {"num_bits": bits, "type": kind}
    if draw(st.booleans()):
        stated |= {"strategy": "group", "group_size": draw(st.sampled_from([16, 128]))}
    if draw(st.booleans()):
        stated["symmetric"] = draw(st.booleans())
    if draw(st.booleans()):
        stated["zp_dtype"] = draw(st.sampled_from([torch.int32, torch.uint8]))
    if draw(st.booleans()):
        stated["scale_dtype"] = torch.bfloat16
    if draw(st.booleans()):
        stated |= {"observer": "memoryless_mse", "observer_kwargs": {"norm": draw(NUMBERS)}}
    return QuantizationArgs(**stated)


def are_apart(groups: dict[str, QuantizationScheme]) -> bool:
    targets = [target for scheme in groups.values() for target in set(scheme.targets)]
    return len(targets) == len(set(targets))


@st.composite
def modifiers(draw: st.DrawFn) -> Modifier:
    common: dict[str, Any] = {}
    if draw(st.booleans()):
        common = {name: draw(st.lists(WORDS, max_size=3)) for name in ("targets", "ignore")}
    kind = draw(st.sampled_from(["gatherer", "scheme", "groups"]))
    if kind == "gatherer":
        return IMatrixGatherer(**common)
    if kind == "scheme":
        scheme = draw(st.sampled_from(["W4A16", "fp8", {"W8A8": ["Linear"]}]))
        if isinstance(scheme, dict):  # which has targets of its own
            common.pop("targets", None)
        return QuantizationModifier(
            scheme=scheme,
            activation_observer=draw(st.none() | st.sampled_from(["minmax", "mse"])),
            weight_observer=draw(
                st.none() | st.fixed_dictionaries({"name": st.just("mse"), "norm": NUMBERS})
            ),
            bypass_divisibility_checks=draw(st.booleans()),
            **common,
        )
    schemes = st.builds(
        QuantizationScheme,
        targets=st.lists(WORDS, min_size=1, max_size=2),
        weights=args(),
    )
    groups = draw(st.dictionaries(WORDS, schemes, min_size=1, max_size=2).filter(are_apart))
    return QuantizationModifier(config_groups=groups, kv_cache_scheme=draw(st.none() | args()))


@given(st.lists(modifiers(), min_size=1, max_size=3))
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_dump_and_load_give_equal_modifiers(made: list[Modifier]) -> None:
    again = load_recipe(load_recipe(made).text).modifiers
    assert again == made
    assert [m.quantization_config() for m in again] == [m.quantization_config() for m in made]


def test_lists_that_were_changed_in_place_are_dumped() -> None:
    modifier = QuantizationModifier(scheme="W4A16")
    modifier.ignore.append("lm_head")
    assert load_recipe(load_recipe(modifier).text).modifiers == [modifier]


def test_what_yaml_cannot_hold_is_refused() -> None:
    bad = QuantizationArgs(num_bits=8, dynamic=True, observer_kwargs={"norm": torch.ones(1)})
    with pytest.raises(RecipeError, match=re.escape("kv_cache_scheme.observer_kwargs.norm")):
        load_recipe(QuantizationModifier(kv_cache_scheme=bad))


def test_a_modifier_without_a_name_is_refused() -> None:
    class Mine(Modifier):
        pass

    with pytest.raises(RecipeError, match=r"Mine is not registered.*@Modifier.register"):
        load_recipe(Mine())
