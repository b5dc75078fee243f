"""The lifecycle of calibration, as a context manager.

    with Calibration(layer) as calibration:
        for batch in data:
            layer(batch)
        calibration.finish()

On entry every module of `layer` with a scheme gets observers and hooks; `finish` observes the
weights, links layers that the server fuses and computes all parameters. On exit all observers and
hooks are removed, and a module whose calibration did not finish is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import disable_quantization, enable_quantization
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from steelyard.distributed import Ranks
from steelyard.kernels.squares import sum_of_squares
from steelyard.observers import Observer, fuse_weight_observers
from steelyard.observers.combine import combine
from steelyard.observers.hooks import calibrate_input_hook, register_hooks
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.observers.observer_state import check_state, state_of
from steelyard.observers.padding import real_tokens
from steelyard.observers.steps import (
    ACTIVATIONS,
    BASE_NAMES,
    apply_calibration_status,
    freeze_module_quantization,
    initialize_observer,
    observe,
    observer_of,
    remove_observers,
    update_qparams,
)

__all__ = ["Calibration", "observed_tokens", "with_schemes"]


class Calibration:
    """Observers on all modules of `root` that have a scheme.

    prefix:  the name of `root` within its model, for messages
    without: a module within `root` whose own modules are skipped
    shown:   only these modules, by name; the caller passes their inputs to `show`, without hooks
    routed:  experts; the caller passes their inputs to `show_routed`, even if others have hooks
    """

    def __init__(
        self,
        root: Module,
        prefix: str = "",
        without: Module | None = None,
        shown: Collection[str] | None = None,
        routed: Collection[str] = (),
    ) -> None:
        self.root = root
        self.modules = with_schemes(root, prefix, without)
        if shown is not None:
            self.modules = {name: self.modules[name] for name in shown}
        self._hooks = shown is None
        self.routed = [name for name in routed if name in self.modules]
        self._tokens: dict[str, int] = {}  # tokens routed to each expert
        self._weighing: dict[str, ImportanceObserver] = {}  # `show` adds their importance
        self._stopped: dict[str, ImportanceObserver] = {}  # the caller adds their importance
        self._weighed: set[str] | None = None  # modules that use importance; None for all
        self._handles: list[RemovableHandle] = []
        self._before: dict[str, tuple[Any, Any]] = {}
        self._synced = False
        self._finished: set[str] = set()

    def __enter__(self) -> Calibration:
        try:
            for name, module in self.modules.items():
                self._before[name] = (
                    getattr(module, "quantization_status", None),
                    getattr(module, "quantization_enabled", True),
                )
                attention = hasattr(module, "kv_cache") or hasattr(module, "impl")
                for base_name in _states(module) if attention else ("weight", "input", "output"):
                    initialize_observer(module, base_name)
                    observer = observer_of(module, base_name)
                    if observer is not None:
                        observer.module_name = name
                if self._hooks:
                    self._handles += register_hooks(module, name not in self.routed)
                apply_calibration_status(module)
                disable_quantization(module)
            fuse_weight_observers(self.root)
        except BaseException:
            self._clean()
            raise
        return self

    def observers(self) -> Iterator[tuple[str, str, Observer]]:
        """Yield module name, base name and observer."""
        for name, module in self.modules.items():
            for base_name in BASE_NAMES:
                observer = observer_of(module, base_name)
                if observer is not None:
                    yield name, base_name, observer

    def gathering(self) -> dict[str, ImportanceObserver]:
        """Return the observers that gather importance themselves or from `show`, by module."""
        return {
            name: observer
            for name, _, observer in self.observers()
            if isinstance(observer, ImportanceObserver) and name not in self._stopped
        }

    def weigh(self, names: Iterable[str]) -> None:
        """Let the weight observers of these modules use importance, besides those named before."""
        self._weighed = {*(self._weighed or ()), *names}

    def drop_unweighed(self) -> None:
        """If `weigh` named modules, stop the others from gathering importance."""
        if self._weighed is None:
            return
        for name, _, observer in self.observers():
            if isinstance(observer, ImportanceObserver) and name not in self._weighed:
                observer.detach(self.modules[name])
                observer.reset()
                self._stopped.pop(name, None)

    def take_over(self) -> None:
        """Let `show` gather importance, instead of the observers' own hooks.

        If modules have hooks, only for experts.
        """
        names = self.routed if self._hooks else list(self.modules)
        self._weighing.update(self._stop_gathering(names))

    def stop_gathering(self, names: Iterable[str]) -> None:
        """Stop observers from gathering importance; the caller adds it with `add_importance`."""
        self._stopped.update(self._stop_gathering(names))

    def _stop_gathering(self, names: Iterable[str]) -> Iterator[tuple[str, ImportanceObserver]]:
        for name in names:
            module = self.modules[name]
            observer = observer_of(module, "weight")
            if isinstance(observer, ImportanceObserver) and observer.stop_gathering(module):
                yield name, observer

    def add_importance(
        self, name: str, importance: Callable[[], tuple[torch.Tensor, int] | None]
    ) -> None:
        """Add importance to an observer that `stop_gathering` stopped.

        importance: returns the sum of x^2 per input channel, and the number of tokens
        """
        if name in self._stopped and (sums := importance()) is not None:
            self._stopped[name].add_importance(*sums)

    def show(self, names: Iterable[str], x: torch.Tensor) -> None:
        """Pass the shared input of modules to the observers of inputs and of importance."""
        self.show_range(names, x)
        self._show_importance(names, real_tokens(x, "input"))

    def show_routed(
        self, names: Sequence[str], x: torch.Tensor | None, weights: torch.Tensor | None
    ) -> None:
        """Pass the tokens of an expert, without padding, to the observers of importance.

        x:       None if no token was routed to it
        weights: (tokens,), the router's factors on the output; None for 1
        """
        for name in names:
            self._tokens[name] = self._tokens.get(name, 0) + (0 if x is None else len(x))
        if x is not None:
            self._show_importance(names, x if weights is None else x * weights[:, None])

    def show_range(self, names: Iterable[str], x: torch.Tensor) -> None:
        """Pass the shared input of modules to the observers of inputs only."""
        for name in names:
            if observer_of(self.modules[name], "input") is not None:
                calibrate_input_hook(self.modules[name], (x,))

    def observes_inputs(self, names: Iterable[str]) -> bool:
        return any(observer_of(self.modules[name], "input") is not None for name in names)

    def _show_importance(self, names: Iterable[str], x: torch.Tensor) -> None:
        weighing = [self._weighing[name] for name in names if name in self._weighing]
        if weighing and x.numel():
            squares = sum_of_squares(x)
            for observer in weighing:
                observer.add_importance(squares, x.numel() // x.shape[-1])

    def tokens(self, name: str) -> int:
        """Return how many tokens reached a module; for an expert, those routed to it."""
        if name in self._tokens:
            return self._tokens[name]
        return observed_tokens(self.modules[name])

    def unseen(self) -> list[str]:
        """Return the modules with static activations that observed none."""
        return list(
            dict.fromkeys(
                name
                for name, base_name, observer in self.observers()
                if base_name in ACTIVATIONS and not observer.has_statistics
            )
        )

    def sync(self, ranks: Ranks | None = None) -> None:
        """Combine the statistics of all ranks, in rank order; once, after the last batch.

        ranks: None for those of the current process group
        """
        if self._synced:
            return
        self._synced = True
        ranks = ranks or Ranks.current()
        if ranks.count == 1:
            return
        tokens = ranks.gather(self._tokens)
        names = dict.fromkeys(name for each in tokens for name in each)
        self._tokens = {name: sum(each.get(name, 0) for each in tokens) for name in names}
        observers = [observer for _, _, observer in self.observers()]
        gathered = ranks.gather([state_of(observer) for observer in observers])
        for observer, *states in zip(observers, *gathered, strict=True):
            for rank, state in enumerate(states):
                check_state(observer, state, f"rank {rank}", "there")
            combine(observer, states)

    def release(self, name: str) -> None:
        """Stop calibrating a module, and restore it."""
        self._restore({name: self.modules.pop(name)})

    def finish(self, weights: Collection[str] | None = None) -> None:
        """Compute every parameter; activations without statistics keep none.

        weights: the modules whose weights are observed; None for all
        """
        self.sync()
        self.compute(self.modules, self.modules if weights is None else weights)

    def compute(self, names: Collection[str], weights: Collection[str]) -> None:
        """Compute the parameters of some modules.

        weights: those whose weights this rank observes; other ranks observe the rest
        """
        chosen = [name for name in names if name in weights]
        for name in chosen:
            observe(self.modules[name], "weight")
        for name in names:
            update_qparams(self.modules[name], BASE_NAMES if name in chosen else ACTIVATIONS)
        self._finished.update(names)

    def __exit__(self, *_: object) -> None:
        self._clean()

    def _clean(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._restore(self.modules)

    def _restore(self, modules: Mapping[str, Module]) -> None:
        for name, module in modules.items():
            remove_observers(module)
            for gathered in ("_imatrix_sum", "_imatrix_count", "_imatrix_bins"):
                module.__dict__.pop(gathered, None)
            if name in self._finished:
                freeze_module_quantization(module)
                enable_quantization(module)
            elif name in self._before:
                status, enabled = self._before[name]
                module.quantization_enabled = enabled
                if status is None:
                    module.__dict__.pop("quantization_status", None)
                else:
                    module.quantization_status = status


def with_schemes(
    root: Module, prefix: str = "", without: Module | None = None
) -> dict[str, Module]:
    """Return the modules of `root` that have a scheme, by their name within the model."""
    left_out = set() if without is None else set(without.modules())
    return {
        f"{prefix}.{name}".strip("."): module
        for name, module in root.named_modules()
        if getattr(module, "quantization_scheme", None) is not None and module not in left_out
    }


def _states(module: Module) -> tuple[str, ...]:
    states = ("k", "v") if hasattr(module, "kv_cache") else ()
    return ("q", *states) if hasattr(module, "impl") else states


def observed_tokens(module: Module) -> int:
    """Return the largest token count of the observers on `module`."""
    counts = [observer_of(module, b) for b in ACTIVATIONS]
    return max((o.num_observed_tokens for o in counts if o is not None), default=0)
