"""Imports a user's own file of observers, modifiers and algorithms, which registers them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path

from steelyard.errors import PluginError

__all__ = ["load_plugin"]


def load_plugin(name: str) -> None:
    """Import a .py file, or a module by its dotted name; a second call changes nothing."""
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            importlib.import_module(name)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(
            f"the plug-in {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise PluginError(f"there is no plug-in file {path}")
    place = str(path.resolve())
    name = f"steelyard_plugin_{path.stem}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    if place in files:  # imported by its own name, or before
        return
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks annotations up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
