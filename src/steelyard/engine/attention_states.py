"""Records the query, key and value states that attention functions are called with.

transformers looks the function up by a name in the config. While states are recorded, the name is
that of a wrapper, which records the states and calls the original function.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.nn import Module

from steelyard.algorithms import Block
from steelyard.errors import PipelineError
from steelyard.model.attention import cached_attention

__all__ = ["attention_modules", "noting_states"]

_NAME = "steelyard_noting_states"


@contextlib.contextmanager
def noting_states(
    modules: Mapping[str, Any], note: Callable[[str, str, Any], None]
) -> Iterator[None]:
    """Call `note(place, name, states)` whenever the attention function of a module is called.

    place:  query | key | value
    states: (batch, heads, tokens, head_dim), after position embeddings
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names = {module: name for name, module in modules.items()}
    configs = {id(config): config for config in (module.config for module in modules.values())}
    before = {key: config._attn_implementation for key, config in configs.items()}

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        if module in names:
            for place, states in (("query", query), ("key", key), ("value", value)):
                note(place, names[module], states)
        name = before[id(module.config)]
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


def attention_modules(block: Block) -> dict[str, Module]:
    """Return the modules of a block that have attention states; raise if targets match none."""
    known = set(cached_attention(block.root).values())
    of_block = [name for name, module in block.within.items() if module in known]
    found = {name: module for name, module in block.modules.items() if name in of_block}
    if of_block and block.modules and not found:
        raise PipelineError(
            f"{block.name} has attention states, but {next(iter(block.modules))} has none: let the "
            f"targets match attention modules such as {of_block[0]}"
        )
    return found
