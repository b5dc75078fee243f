"""From options to a recipe: the output head stays unless it is asked for."""

from __future__ import annotations

import pytest

from steelyard.cli.recipe import recipe_from


@pytest.mark.parametrize(
    ("ignore", "targets", "expected"),
    [
        (None, None, ["lm_head"]),
        (["re:.*mlp.*"], None, ["lm_head", "re:.*mlp.*"]),
        (["lm_head", "re:.*mlp.*"], None, ["lm_head", "re:.*mlp.*"]),
        ([""], None, []),
        (["", "re:.*mlp.*"], None, ["re:.*mlp.*"]),
        (None, ["Linear"], ["lm_head"]),
        (None, ["Linear", "lm_head"], []),
        (["re:.*mlp.*"], [r"re:.*lm_head$"], ["re:.*mlp.*"]),
    ],
)
def test_the_head_stays_unless_it_is_named(
    ignore: list[str] | None, targets: list[str] | None, expected: list[str]
) -> None:
    made = recipe_from("FP8_DYNAMIC", None, ignore=ignore, targets=targets)
    assert made.ignore == expected
