"""Query, key and value states of attention modules, as their attention function gets them.

transformers looks the function up by a name in the config. For a while that is one of our own,
which notes the states and calls the function that was there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.nn import Module

from steelyard.errors import PipelineError

__all__ = ["noting_states"]

_NAME = "steelyard_noting_states"


@contextlib.contextmanager
def noting_states(
    modules: Mapping[str, Module], note: Callable[[str, str, Any], None]
) -> Iterator[None]:
    """Call `note(place, name, states)` whenever the attention function of a module is called.

    place:  query | key | value
    states: (batch, heads, tokens, head_dim), after position embeddings
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = {module: name for name, module in modules.items()}
    configs = {id(config): config for config in map(_config_of, modules.items())}
    before = {key: config._attn_implementation for key, config in configs.items()}

    def attention(module: Module, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        if module in names:
            for place, states in (("query", query), ("key", key), ("value", value)):
                note(place, names[module], states)
        name = before[id(_config_of((names.get(module, ""), module)))]
        own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, own)
        return function(module, query, key, value, *args, **more)

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attention)
    try:
        for config in configs.values():
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _config_of(item: tuple[str, Module]) -> Any:
    name, module = item
    config = getattr(module, "config", None)
    if not hasattr(config, "_attn_implementation_internal"):
        raise PipelineError(
            f"{name} is no attention module of transformers ({type(module).__name__}), so it has "
            "no attention states: let the targets match attention modules alone"
        )
    return config
