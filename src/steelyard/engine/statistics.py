"""Calibration over several runs: a run saves its statistics, or reads a file instead of data.

    oneshot(model, recipe, monday, save_statistics="monday.safetensors")
    oneshot(model, recipe, tuesday, save_statistics="tuesday.safetensors")
    merge_statistics(["monday.safetensors", "tuesday.safetensors"], "all.safetensors")
    oneshot(model, recipe, statistics="all.safetensors", output_dir="quantized")

The checkpoint is that of one run over all the data, bit for bit. That holds if every layer gets the
output of unquantized layers. With `propagate_error`, and so with GPTQ, its input includes the error
of weights that were rounded for the data of one run, so statistics do not add up and are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms import Algorithm, needs_data
from steelyard.data.samples import Samples
from steelyard.engine.identity import digest_of, versions
from steelyard.engine.statistics_file import STATISTICS, Key, Observed, Statistics, fingerprint
from steelyard.errors import PlanError, StatisticsError
from steelyard.model.source import Source
from steelyard.observers import Observer
from steelyard.observers.calibration import Calibration
from steelyard.observers.observer_state import restore
from steelyard.observers.statistics_checks import check_statistics

__all__ = ["RunStatistics", "merge_statistics"]

_OF_NO_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def merge_statistics(paths: Sequence[str | Path], out: str | Path) -> None:
    """Join files into one, equal to that of one run over all their data, in this order."""
    if isinstance(paths, (str, Path)) or not paths:
        raise StatisticsError("merge_statistics needs a list of one or more files")
    STATISTICS.check_place(out)
    Statistics.joined([(str(path), Statistics.read(path)) for path in paths]).write(out)


class RunStatistics:
    """Saves or restores the statistics of a run.

    save_to: file to write; None saves nothing
    file:    file to read instead of data
    only:    only save statistics; no weight is quantized
    """

    def __init__(
        self,
        algorithms: Sequence[Algorithm],
        propagate: bool,
        save_to: str | Path | None = None,
        file: str | Path | None = None,
    ) -> None:
        self.save_to = save_to
        self.file = file
        self.only = False
        self.saved: Statistics | None = None
        self.given: Statistics | None = None
        if save_to is None and file is None:
            return
        _check_request(algorithms, propagate, save_to, file)
        if save_to is not None:
            STATISTICS.check_place(save_to)
        if file is not None:
            self.given = Statistics.read(file)

    # -- before -------------------------------------------------------------------------------

    def begin(self, source: Source, name: str, recipe: str, samples: Samples) -> None:
        """Record the model, recipe and data that the file will name."""
        if self.save_to is None:
            return
        run = {
            "data": digest_of(samples.batches),
            "samples": samples.num_samples,
            "tokens": samples.num_tokens,
            "versions": versions(),
        }
        model = {"name": name, "config": _config_digest(source)}
        self.saved = Statistics(recipe, model, [run])

    def describe(self, source: Source) -> str:
        """Return a line about the origin of the statistics; raise if they are of another model."""
        given = self.given
        assert given is not None
        if given.model["config"] != _config_digest(source):
            raise StatisticsError(
                f"{self.file} is of {given.model['name']!r}, a model with another configuration; "
                "observe this model"
            )
        runs = "1 run" if len(given.runs) == 1 else f"{len(given.runs)} runs"
        return (
            f"statistics of {given.total('samples')} samples with {given.total('tokens')} tokens "
            f"in {runs}, from {self.file}"
        )

    def check(
        self, model: Module, begin: Callable[[Calibration], object], notes: list[str]
    ) -> None:
        """Check before any work that the statistics fit the model and the recipe.

        model: with its schemes
        begin: starts the recipe's algorithms, which choose the observers
        """
        if self.given is None:
            return
        modules = dict(model.named_modules())
        for name in dict.fromkeys(module for module, _ in self.given.observers):
            if name not in modules:
                raise StatisticsError(
                    f"{self.file} is of another model: this one has no {name}; observe this model"
                )
            self._check_weight(name, modules[name])
        used: set[Key] = set()
        with Calibration(model) as calibration:
            begin(calibration)
            for name, base, observer in calibration.observers():
                if _sees_data(base, observer):
                    self._restore(name, base, observer, torch.device("cpu"))
                    self._check_channels(name, base, modules[name])
                    used.add((name, base))
        if unused := [key for key in self.given.observers if key not in used]:
            name, base = unused[0]
            notes.append(
                f"{self.file} has {len(unused)} statistics that the recipe does not ask for, such "
                f"as {base} of {name}"
            )

    def digests(self) -> dict[str, Any]:
        """Return digests; a run resumes only with the same statistics."""
        given = {} if self.given is None else {"statistics": self.given.digest()}
        return given | ({} if self.save_to is None else {"save_statistics": True})

    # -- one part of the model ----------------------------------------------------------------

    def exchange(self, calibration: Calibration, device: torch.device) -> None:
        """Keep the statistics of an observed part, or restore those of the file."""
        if self.saved is None and self.given is None:
            return
        for name, base, observer in calibration.observers():
            if not _sees_data(base, observer):
                continue
            module: Any = calibration.modules[name]
            if self.given is not None:
                self._check_weight(name, module)
                self._restore(name, base, observer, device)
            elif self.saved is not None:
                self.saved.observers[name, base] = Observed.of(observer)
                if module._parameters.get("weight") is not None:
                    self.saved.weights[name] = fingerprint(module.weight)

    def _restore(self, name: str, base: str, observer: Observer, device: torch.device) -> None:
        assert self.given is not None
        found = self.given.observers.get((name, base))
        if found is None:
            what = "importance for" if base == "weight" else f"statistics of the {base} of"
            raise StatisticsError(
                f"{self.file} holds no {what} {name}, which the recipe needs; observe again with "
                "this recipe"
            )
        identity, tensors = found.state
        moved = {key: value.to(device, copy=True) for key, value in tensors.items()}
        check_statistics(observer, identity, moved, str(self.file))
        origin = f"{self.file}, which was observed with another recipe,"
        restore(observer, (identity, moved), origin)

    def _check_weight(self, name: str, module: Any) -> None:
        """Raise if the statistics are of another weight; compare shapes if it is not loaded."""
        assert self.given is not None
        weight, known = module._parameters.get("weight"), self.given.weights.get(name)
        if weight is None or known is None:
            return
        if weight.device.type == "meta":
            here = str(tuple(weight.shape))
            fits = known.startswith(f"{here} ")
        else:
            here = fingerprint(weight)
            fits = here == known
        if not fits:
            raise StatisticsError(
                f"{self.file} is of another model: the weight of {name} was {known} (shape, type, "
                f"digest), and is {here}; observe this model"
            )

    def _check_channels(self, name: str, base: str, module: Any) -> None:
        """Raise if the importance has another number of input channels than the weight."""
        assert self.given is not None
        sums = self.given.observers[name, base].state[1].get("_imatrix_sum")
        weight = module._parameters.get("weight")
        if sums is None or weight is None or sums.shape == weight.shape[-1:]:
            return
        raise StatisticsError(
            f"{self.file} is damaged: the importance of {name} has shape {tuple(sums.shape)}, but "
            f"its weight has {weight.shape[-1]} input channels; observe the data again"
        )

    # -- resuming -----------------------------------------------------------------------------

    def keep(self, path: Path) -> bool:
        """Write the statistics so far; return whether there are any."""
        if self.saved is None or not self.saved.observers:
            return False
        self.saved.write(path)
        return True

    def resume(self, path: Path) -> None:
        if self.saved is not None:
            self.saved = Statistics.read(path)

    # -- the end ------------------------------------------------------------------------------

    def save(self, notes: list[str]) -> None:
        if self.saved is None or self.save_to is None:
            return
        self.saved.write(self.save_to)
        unseen = [k for k, each in self.saved.observers.items() if not each.state[0]["updates"]]
        unseen = [(name, base) for name, base in unseen if base != "weight"]
        if self.only and unseen:
            notes.append(
                f"{len(unseen)} observers saw no token, such as that of the {unseen[0][1]} of "
                f"{unseen[0][0]}; runs over other data may fill them"
            )


def _sees_data(base: str, observer: Observer) -> bool:
    """Whether an observer's statistics, before it observes the weight, come from calibration data.

    One that gathers importance starts with sums over no tokens.
    """
    return base != "weight" or bool(observer.get_statistics())


def _check_request(
    algorithms: Sequence[Algorithm],
    propagate: bool,
    save_to: str | Path | None,
    file: str | Path | None,
) -> None:
    name = "save_statistics" if file is None else "statistics"
    if save_to is not None and file is not None:
        raise PlanError(
            "statistics= and save_statistics= exclude each other: a run without data has no "
            "statistics to save"
        )
    for algorithm in algorithms:
        if not algorithm.mergeable:
            raise PlanError(
                f"{name}= does not work with {type(algorithm.modifier).__name__}: it changes "
                "weights by the data, and later layers get the error of earlier ones, so the "
                "statistics of separate runs do not add up to one run; use all data in one run"
            )
    if propagate:
        raise PlanError(
            f"{name}= does not work with propagate_error=True: later layers get the error of "
            "earlier ones, which depends on the data of that run, so the statistics of separate "
            "runs do not add up to one run; remove propagate_error"
        )
    if not needs_data(algorithms):
        raise PlanError(
            f"{name}= has no effect: the recipe needs no calibration data, so there is nothing to "
            "observe; remove it"
        )


def _config_digest(source: Source) -> str:
    """Return a digest of the configuration that is the same for a folder and a loaded module."""
    content = source.model.config.to_diff_dict()
    kept = {k: v for k, v in content.items() if k not in _OF_NO_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
