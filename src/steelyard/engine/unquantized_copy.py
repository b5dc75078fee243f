"""A copy of a block that stays unquantized while the block itself is solved.

It shares all tensors with the block. Solving a module replaces its weight and leaves the tensor, so
the copy keeps the weights of before.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch.nn import Module, Parameter

__all__ = ["can_be_copied", "unquantized_copy"]


def can_be_copied(root: Module, modules: Collection[Module]) -> bool:
    """Whether no other module of a block has a forward of its own, which a copy would share."""
    copied = {root, *modules}
    return not any("forward" in m.__dict__ for m in root.modules() if m not in copied)


def unquantized_copy(root: Module, modules: Collection[Module]) -> tuple[Module, list[Module]]:
    """Return a copy of a block, and the copies of some of its modules.

    modules: those that will be solved; plain Linear layers
    """
    shared = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers())}
    made = copy.deepcopy(root, dict(shared))
    copies = dict(zip(root.modules(), made.modules(), strict=True))
    solved = [copies[module] for module in modules]
    for module in (made, *solved):
        module.__dict__.pop("forward", None)  # bound to the module that it was copied from
    for module in solved:
        for name, parameter in module._parameters.items():
            if parameter is not None:  # its own: the block's is cast and replaced
                module._parameters[name] = Parameter(parameter.data, requires_grad=False)
    return made, solved
