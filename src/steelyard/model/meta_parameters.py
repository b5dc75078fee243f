"""Builds a model with parameters on the meta device, up to a limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn import Module, Parameter

from steelyard.errors import PipelineError

__all__ = ["parameters_on_meta"]


@contextlib.contextmanager
def parameters_on_meta(limit: int) -> Iterator[None]:
    """Create new parameters on the meta device; raise a PipelineError beyond `limit` of them."""
    register = Module.register_parameter
    count = 0

    def on_meta(self: Module, name: str, parameter: Parameter | None) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise PipelineError(
                f"config.json describes a model of more than {limit:,} parameters, far more than "
                "the files hold; correct its numbers of layers and experts"
            )
        if parameter is not None and parameter.device.type != "meta":
            parameter = Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(self, name, parameter)

    Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]
