"""Passes the inputs of a block's modules to observers and algorithms.

Most modules are called with one tensor, which several may share. Experts get theirs at a
`RoutingPoint`: each its own tokens with their weights, and for ranges all tokens of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from steelyard.engine.block_work import Moment, Work
from steelyard.model.early_stop import StopAfter
from steelyard.observers.calibration import Calibration
from steelyard.observers.padding import without_padding
from steelyard.observers.routing import RoutedInputs, RoutingPoint, routing_points
from steelyard.observers.steps import has_coarse_inputs
from steelyard.observers.token_weights import token_weights

__all__ = ["Stage", "points_of", "showing", "stages_of", "until_seen"]


@dataclass(frozen=True)
class Stage:
    """Modules that get their inputs at the same time.

    point: the routing point of experts; None for modules that are called with one tensor
    weighed: whether tokens have weights: an output changes what the block puts out at its own token
             alone, and inputs are not rounded to few bits
    """

    modules: Mapping[str, Module]
    point: RoutingPoint | None = None
    weighed: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.modules)

    @property
    def called(self) -> list[Module]:
        """The modules to hook for the input."""
        return list(self.modules.values()) if self.point is None else [self.point]

    def show(
        self,
        value: Any,
        calibration: Calibration,
        work: Work,
        moment: Moment,
        original: Any = None,
    ) -> None:
        """Pass the input of a batch on; for experts this also calls `Work.flush`."""
        if self.point is not None:
            self._show_routed(value, calibration, work, moment)
            return
        if moment.turn == 0:
            calibration.show(self.names, value)
        weights = token_weights() if self.weighed else None
        roots = None if weights is None else weights.sqrt()
        work.show(self.names, value, moment, original=original, token_roots=roots)

    def _show_routed(
        self, inputs: RoutedInputs, calibration: Calibration, work: Work, moment: Moment
    ) -> None:
        assert self.point is not None
        known = {module: name for name, module in self.modules.items()}
        with without_padding(None):  # the inputs have none
            for number, linears in enumerate(self.point.linears):
                names = [known[linear] for linear in linears if linear in known]
                if not names:
                    continue
                x, weights = inputs.tokens(number), inputs.weights(number)
                if moment.turn == 0:
                    calibration.show_routed(names, x, weights)
                    if calibration.observes_inputs(names):
                        seen = x if inputs.everyone is None else inputs.everyone(number)
                        if seen is not None:
                            calibration.show_range(names, seen)
                if x is not None:
                    work.show(names, x, moment, weights)
            work.flush()  # the inputs of a batch's experts take more memory than the batch


def points_of(root: Module, modules: Mapping[str, Module]) -> dict[str, RoutingPoint]:
    """Return the routing point of each module that is part of an expert."""
    points = {
        linear: point
        for point in routing_points(root)
        for linears in point.linears
        for linear in linears
    }
    return {name: points[module] for name, module in modules.items() if module in points}


def stages_of(
    names: Sequence[Sequence[str]],
    modules: Mapping[str, Module],
    points: Mapping[str, RoutingPoint],
    stays: Sequence[bool],
) -> list[Stage]:
    """Return the stages of a block, from the module names of each.

    stays: of each stage, whether its outputs stay with their token
    """
    found = []
    for stage, own in zip(names, stays, strict=True):
        chosen = {name: modules[name] for name in stage}
        weighed = own and not any(map(has_coarse_inputs, chosen.values()))
        found.append(Stage(chosen, points.get(stage[0]), weighed))
    return found


@contextlib.contextmanager
def showing(
    points: Mapping[str, RoutingPoint],
    calibration: Calibration,
    work: Work,
    moment: Callable[[], Moment],
) -> Iterator[None]:
    """Pass the inputs of experts on whenever a batch reaches a routing point."""
    calibration.take_over()
    with contextlib.ExitStack() as hooks:
        for point in dict.fromkeys(points.values()):
            modules = {n: calibration.modules[n] for n, each in points.items() if each is point}
            stage = Stage(modules, point)

            def show(_module: Module, args: tuple[Any, ...], stage: Stage = stage) -> None:
                stage.show(args[0], calibration, work, moment())

            hooks.callback(point.register_forward_pre_hook(show).remove)
        yield


def until_seen(
    layer: Module, calibration: Calibration, points: Mapping[str, Module], attention: bool
) -> Any:
    """End the first of two passes after the last module to observe, such as `down_proj`.

    Not if outputs or attention states are observed: those exist only after a module has run.
    """
    inputs = all(base in ("weight", "input") for _, base, _ in calibration.observers())
    if not inputs or not calibration.modules or attention:
        return contextlib.nullcontext()
    return StopAfter(layer, [points.get(n, m) for n, m in calibration.modules.items()])
