"""The page of the API has every public name, with its signature and docstring."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib import import_module

import api_docs

from steelyard.engine.run_options import Options
from steelyard.entry import oneshot
from steelyard.modifiers import Modifier


def sections() -> dict[str, str]:
    parts = re.split(r"^### `(\w+)`$", api_docs.page(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_name_is_described_and_can_be_imported() -> None:
    found = sections()
    assert list(found) == api_docs.names()
    for name, text in found.items():
        home = re.search(rf"^`from ([\w.]+) import {name}`$", text, re.MULTILINE)
        assert home is not None, name
        value = getattr(import_module(home[1]), name)
        first = inspect.cleandoc(value.__doc__ or "").splitlines()[0]
        assert first and first in text, name


def test_modifiers_of_the_package_and_arguments_of_oneshot_are_all_there() -> None:
    found = sections()
    ours = {
        cls.__name__
        for cls in map(Modifier.registry.get, Modifier.registry)
        if cls.__module__.startswith("steelyard.")
    }
    assert ours <= set(found)
    for name in inspect.signature(oneshot).parameters:
        assert re.search(rf"^    {name}:", found["oneshot"], re.MULTILINE), name
    for field in fields(Options):
        assert f"| `{field.name}` |" in found["Options"], field.name
