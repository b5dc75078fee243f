"""Foreign text: nothing that acts on a terminal, and not much of it."""

from __future__ import annotations

import unicodedata

import pytest
from pydantic import BaseModel, ValidationError

from steelyard.errors import CheckpointError, UnknownNameError
from steelyard.foreign import LONGEST, printable, reason_of, show

HOSTILE = "\x1b[2J\x9b31m\r\b\u202e\u2066\u200b\u2028\ud800\x00[red]"


def test_every_character_is_printable_or_escaped() -> None:
    everything = "".join(map(chr, range(0x30000)))
    shown = printable(everything)
    acting = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not [c for c in shown if unicodedata.category(c) in acting]
    shown.encode("utf-8")
    assert printable("Grüße, 世界 [red]") == "Grüße, 世界 [red]"


def test_lines_are_kept_only_where_asked() -> None:
    assert printable("a\nb\r") == "a\\nb\\r"
    assert printable("a\nb\r", keep="\n") == "a\nb\\r"


@pytest.mark.parametrize("kind", [CheckpointError, UnknownNameError])
def test_errors_escape_what_they_quote(kind: type[Exception]) -> None:
    said = str(kind(f"{HOSTILE} is wrong\n  - really"))
    assert said.replace("\n", "").isprintable() and said.endswith("[red] is wrong\n  - really")


def test_reasons_are_short_and_say_what_they_are_of() -> None:
    assert reason_of(ValueError("")) == "ValueError"
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert reason_of(ValueError("one\n two")) == "one two"
    assert len(reason_of(ValueError("x" * 92_000))) <= LONGEST + 3
    assert reason_of(ValueError(HOSTILE)).isprintable()

    class Settings(BaseModel):
        size: int

    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"size": "many"})
    assert reason_of(caught.value).startswith("size: Input should be a valid integer")


def test_values_are_shown_short() -> None:
    nested: list[object] = []
    for _ in range(500):
        nested = [nested]
    for value in (HOSTILE, "x" * 10**6, {HOSTILE: ["y" * 1000] * 1000}, nested):
        assert show(value).isprintable() and len(show(value)) < 1000
