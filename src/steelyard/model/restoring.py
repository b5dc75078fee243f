"""Restores a model: its training mode always, everything else after an error or when asked to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

__all__ = ["restored", "restored_on_error"]


@contextlib.contextmanager
def restored_on_error(model: Any) -> Iterator[None]:
    """On an error, remove everything attached to modules: schemes, parameters, hooks, forwards."""
    before = [(module, _shallow(module)) for module in model.modules()]
    attention = getattr(model.config, "_attn_implementation", None)
    try:
        yield
    except BaseException:
        for module, state in before:
            _restore(module, state)
        if attention is not None:
            model.config._attn_implementation = attention
        raise
    for module, state in before:
        module.training = state["training"]


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Undo what was attached to modules inside the context, in any case."""
    before = [(module, _shallow(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, state in before:
            _restore(module, state)


def _shallow(module: Module) -> dict[str, Any]:
    return {k: v.copy() if isinstance(v, (dict, set)) else v for k, v in module.__dict__.items()}


def _restore(module: Module, state: dict[str, Any]) -> None:
    for key in list(module.__dict__):
        if key not in state:
            del module.__dict__[key]
    for key, value in state.items():
        present = module.__dict__.get(key)
        if isinstance(value, (dict, set)) and isinstance(present, (dict, set)):
            present.clear()  # in place: others may hold a reference
            present.update(value)
        else:
            module.__dict__[key] = value
