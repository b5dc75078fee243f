"""A registry: what it holds can be asked for by name, listed and described."""

from __future__ import annotations

import pytest

from steelyard.errors import UnknownNameError
from steelyard.registry import Registry


class Scale:
    """Weighs things.

    With one sliding weight.
    """


class Balance: ...


Balance.__doc__ = None


@pytest.fixture
def scales() -> Registry[type]:
    registry: Registry[type] = Registry("scale")
    assert registry.register("steel_yard")(Scale) is Scale
    registry.register("balance")(Balance)
    return registry


@pytest.mark.parametrize("name", ["steel_yard", "steel-yard", "Steel Yard", " STEEL_YARD "])
def test_name_is_found_however_it_is_written(scales: Registry[type], name: str) -> None:
    assert scales.get(name) is Scale
    assert name in scales


def test_listing_is_sorted(scales: Registry[type]) -> None:
    assert scales.names() == list(scales) == ["balance", "steel_yard"]
    assert "steel" not in scales


def test_description_is_the_first_line_of_the_docstring(scales: Registry[type]) -> None:
    assert scales.describe() == {"balance": "", "steel_yard": "Weighs things."}


def test_names_are_normalised_on_entering() -> None:
    registry: Registry[type] = Registry("scale")
    registry.register("Kitchen-Scale")(Scale)
    assert registry.names() == ["kitchen_scale"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("balanc", "did you mean 'balance'?"), ("Stealyard", "did you mean 'steel_yard'?")],
)
def test_unknown_name_suggests_the_nearest(scales: Registry[type], name: str, hint: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        scales.get(name)
    assert str(caught.value) == f"no scale is registered as {name!r}: {hint}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_unknown_name_lists_all_when_none_is_near(scales: Registry[type]) -> None:
    with pytest.raises(UnknownNameError, match="known: balance, steel_yard"):
        scales.get("zzz")
    with pytest.raises(UnknownNameError, match="known: none"):
        Registry("empty").get("anything")


def test_same_class_defined_again_replaces_itself() -> None:
    def define() -> type:
        class Defined: ...

        return Defined

    registry: Registry[type] = Registry("scale")
    first, second = registry.register("it")(define()), registry.register("it")(define())
    assert first is not second
    assert registry.get("it") is second


def test_name_is_not_taken_from_another_class(scales: Registry[type]) -> None:
    with pytest.raises(
        ValueError, match=r"scale 'balance' is already registered by .*Balance; reg"
    ):
        scales.register("Balance")(Scale)
    assert scales.get("balance") is Balance


def test_one_class_may_have_two_names(scales: Registry[type]) -> None:
    scales.register("roman")(Scale)
    assert scales.get("roman") is scales.get("steel_yard")


def test_registries_are_apart(scales: Registry[type]) -> None:
    assert Registry("scale").names() == []
    assert len(scales.names()) == 2
