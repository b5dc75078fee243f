"""Output error of quantized modules: what flows out as stored, against the original.

The original module and the quantized one get the same input, that of the original model. The error
is the sum of squared differences of their outputs over the sum of squares of the original's, so it
includes rounded inputs where the scheme rounds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

__all__ = ["ErrorSum", "OutputErrors"]


@dataclass
class ErrorSum:
    """Sums of squares, in fp64: of the differences, and of the original values."""

    noise: float = 0.0
    signal: float = 0.0

    def add(self, found: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> None:
        """Add values; `size` is what their differences are relative to."""
        self.noise += float((found - wanted).double().square().sum())
        self.signal += float(size.double().square().sum())

    @property
    def relative(self) -> float | None:
        """The relative squared error; None if the original is zero."""
        return self.noise / self.signal if self.signal else None


@dataclass
class OutputErrors:
    """Compares the modules that are quantized in one of two models, while both are in memory."""

    base: Module
    quantized: Module
    found: dict[str, ErrorSum] = field(default_factory=dict)
    _calls: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the inputs and outputs of the original's modules until `compare`."""
        pairs = dict(self.base.named_modules())
        with contextlib.ExitStack() as hooks:
            for name, module in self.quantized.named_modules():
                scheme: Any = getattr(module, "quantization_scheme", None)
                original = pairs.get(name)
                if scheme is not None and isinstance(original, torch.nn.Linear):
                    hook = original.register_forward_hook(self._keep(name))
                    hooks.callback(hook.remove)
            yield
        self._calls.clear()

    def _keep(self, name: str) -> Any:
        def keep(_module: Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            self._calls.append((name, args[0], output))

        return keep

    @torch.no_grad()
    def compare(self) -> None:
        """Run the quantized modules on the kept inputs, and add up their errors.

        Those that are not in memory, such as a projector between a tower and the decoder, are left
        out.
        """
        calls, self._calls = self._calls, []
        for name, x, output in calls:
            module: Any = self.quantized.get_submodule(name)
            if module.weight.device.type != "meta":
                self.found.setdefault(name, ErrorSum()).add(module(x), output, output)
