"""From a model and a recipe to a checkpoint, in one call.

    oneshot("path/to/model", recipe, dataset="calibration.jsonl", output_dir="quantized")

A recipe is planned first, and nothing heavy starts unless the plan holds. A recipe that needs no
data reads each weight once. One that does runs the decoder's layers one after another; a layer is
calibrated in the pass that computes the input of the next.
"""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    disable_quantization,
)
from torch.nn import Module

from steelyard.calibration import Calibration
from steelyard.calibration.lifecycle import observed_tokens
from steelyard.errors import CalibrationError, DataError, PipelineError, PlanError, nearest
from steelyard.modifiers import QuantizationModifier
from steelyard.pipelines.data import Samples, load_samples
from steelyard.pipelines.plan import Plan, make_plan
from steelyard.pipelines.progress import progress
from steelyard.pipelines.saving import Output, save_as_quantized, weight_error
from steelyard.pipelines.sequential import Batch, LayerSequence, decoder_layers
from steelyard.pipelines.source import Source, computing_in, fast_dtype
from steelyard.recipes import Recipe, load_recipe

__all__ = ["ModuleResult", "Result", "oneshot"]

PIPELINES = ("auto", "sequential", "basic", "datafree")
UNCALIBRATED = ("error", "weights-only")


@dataclass(frozen=True)
class ModuleResult:
    """What became of one module.

    error:  squared error of the stored weight, over the sum of squares of the weight
    tokens: how many calibration tokens its observers saw
    """

    error: float | None
    tokens: int


@dataclass
class Result:
    """What a run did.

    model: the module that was given, now quantized; None where the source was a folder
    """

    plan: Plan
    recipe: Recipe
    modules: dict[str, ModuleResult] = field(default_factory=dict)
    output_dir: Path | None = None
    model: Any = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def oneshot(
    model: Any,
    recipe: Any = None,
    dataset: Any = None,
    output_dir: str | Path | None = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = 2048,
    batch_size: int = 1,
    text_column: str = "text",
    splits: str | None = None,
    shuffle_calibration_samples: bool = True,
    seed: int = 0,
    pipeline: str = "auto",
    propagate_error: bool | None = None,
    uncalibrated: str = "error",
    overwrite: bool = False,
    dry_run: bool = False,
    model_revision: str | None = None,
    trust_remote_code_model: bool = False,
    show_progress: bool | None = None,
) -> Result:
    """Quantize a model.

    model:        a folder, a name on the hub, or a loaded module (which is changed in place)
    recipe:       see `steelyard.recipes.load_recipe`
    dataset:      see `steelyard.pipelines.data.load_samples`; only where the recipe needs data
    output_dir:   where the checkpoint goes; may be left out for a loaded module
    pipeline:     sequential (layer by layer) | basic (the whole model at once) | datafree; auto
                  takes the last where no data is needed, else the first
    propagate_error: show each layer what the quantized layers before it give, at the cost of a
                  second pass; None does so where a modifier asks for it
    uncalibrated: what a module that no token reached gets: an error, or weights-only
    dry_run:      stop after the plan
    """
    started = time.perf_counter()
    _one_of("pipeline", pipeline, PIPELINES)
    _one_of("uncalibrated", uncalibrated, UNCALIBRATED)
    loaded = load_recipe(recipe)
    source = Source.open(model, model_revision, trust_remote_code_model)
    if source.shards is not None and output_dir is None and not dry_run:
        raise PlanError("output_dir is missing: where should the checkpoint go?")
    config, check = _config_of(loaded)
    plan = make_plan(source.model, config, check)
    text_config = source.model.config.get_text_config()
    plan.layers = getattr(text_config, "num_hidden_layers", 1)
    plan.hidden = getattr(text_config, "hidden_size", 0)
    if loaded.needs_data:
        plan.tokens = num_calibration_samples * (max_seq_length or 2048)  # at most
    if show_progress or (show_progress is None and sys.stderr.isatty()):
        print(plan, file=sys.stderr)
    result = Result(plan, loaded, model=model if isinstance(model, Module) else None)
    if dry_run:
        return result
    plan.require()
    if propagate_error is None:
        propagate_error = any(m.propagates_error for m in loaded.modifiers)
    run = _Run(source, result, uncalibrated, propagate_error, show_progress)
    needs_data = loaded.needs_data
    if pipeline == "datafree" and needs_data:
        raise DataError('the recipe needs calibration data, so pipeline="datafree" cannot run it')
    if needs_data and dataset is None:
        raise DataError(
            "the recipe needs calibration data (static activations, a KV cache or importance): "
            "pass dataset="
        )
    if dataset is not None and not needs_data:
        note = "the recipe needs no calibration data; the dataset is not read"
        result.notes.append(note)
        warnings.warn(note, stacklevel=2)
    samples = None
    if needs_data:
        samples = load_samples(
            dataset,
            tokenizer=lambda: _tokenizer(tokenizer or processor, source),
            num_calibration_samples=num_calibration_samples,
            max_seq_length=max_seq_length or 2048,
            batch_size=batch_size,
            text_column=text_column,
            split=splits,
            shuffle=shuffle_calibration_samples,
            seed=seed,
            vocab_size=getattr(text_config, "vocab_size", None),
        )
        result.notes.append(samples.description)
    with Output.open(source, output_dir, overwrite, tokenizer or processor) as run.output:
        _apply(source.model, config)
        if samples is None:
            run.weights_only()
        elif pipeline == "basic":
            run.whole(samples)
        else:
            run.layer_by_layer(samples)
        run.raise_unseen()
        final = run.final_config(config)
        result.output_dir = run.output.finish(final, loaded.text, result.modules, plan)
    if result.model is not None:
        save_as_quantized(source, final, loaded.text, result.modules, plan, tokenizer or processor)
    result.seconds = time.perf_counter() - started
    return result


class _Run:
    """The state of one run: what is left to do is in the calls, what was found is here."""

    def __init__(
        self,
        source: Source,
        result: Result,
        uncalibrated: str,
        propagate: bool,
        show: bool | None,
    ) -> None:
        self.source = source
        self.result = result
        self.uncalibrated = uncalibrated
        self.propagate = propagate
        self.show = show
        self.output: Output
        self.unseen: list[str] = []
        self.weights_only_schemes: dict[str, QuantizationScheme] = {}
        self.dtype = fast_dtype(source.dtype, _device(source.model))

    # -- the three ways through a model -----------------------------------------------------

    def weights_only(self) -> None:
        """Observe weights, module by module where the model has no layers."""
        try:
            name, layers = decoder_layers(self.source.model)
        except PipelineError:
            self._module(self.source.model, "", None, lambda: None)
            return
        with progress("quantizing", len(layers) + 1, self.show) as advance:
            for index, layer in enumerate(layers):
                self._module(layer, f"{name}.{index}", None, lambda: None)
                advance()
            self._module(self.source.model, "", layers, lambda: None)
            advance()

    def layer_by_layer(self, samples: Samples) -> None:
        sequence = LayerSequence(self.source.model)
        source, model, layers = self.source, self.source.model, sequence.layers
        total = len(samples.batches) * (len(layers) + 1)
        with progress("calibrating", total, self.show) as advance:
            first = f"{sequence.name}.0"
            with (
                source.loaded(layers[0], first),
                self._outside(sequence),
                computing_in(model, self.dtype),
            ):
                batches = sequence.start(samples.batches, advance)
            for index, layer in enumerate(layers):

                def run(index: int = index) -> None:
                    for batch in batches:
                        output = sequence.run(index, batch)
                        if not self.propagate:
                            batch.hidden = output
                            advance()

                def again(index: int = index) -> None:
                    for batch in batches if self.propagate else ():
                        batch.hidden = sequence.run(index, batch)
                        advance()

                self._module(layer, f"{sequence.name}.{index}", None, run, again)
            self._rest(sequence, batches)

    def whole(self, samples: Samples) -> None:
        with progress("calibrating", len(samples.batches), self.show) as advance:

            def run() -> None:
                for input_ids in samples.batches:
                    self.source.model(input_ids=input_ids, use_cache=False)
                    advance()

            self._module(self.source.model, "", None, run)

    def _rest(self, sequence: LayerSequence, batches: list[Batch]) -> None:
        """Calibrate what is not in a layer, such as the output projection."""
        inside = f"{sequence.name}."
        rest = [p for p in self.result.plan.quantized if not p.name.startswith(inside)]

        def run() -> None:
            for batch in batches if rest else ():
                sequence.finish(batch)

        self._module(self.source.model, "", sequence.layers, run)

    def _outside(self, sequence: LayerSequence) -> Any:
        return self.source.loaded(self.source.model, "", skip=(sequence.name, "lm_head"))

    # -- one module -------------------------------------------------------------------------

    @torch.no_grad()
    def _module(
        self,
        module: Module,
        name: str,
        without: Module | None,
        run: Callable[[], None],
        again: Callable[[], None] = lambda: None,
    ) -> None:
        """Calibrate `module` while `run` passes data through it; hand its tensors to the output.

        again: a pass through the quantized module
        """
        skip = () if without is None else (decoder_layers(self.source.model)[0],)
        with self.source.loaded(module, name, skip):
            with Calibration(module, name, without) as calibration:
                with computing_in(module, self.dtype):
                    run()
                self._note_unseen(calibration)
                calibration.finish()
                tokens = {n: observed_tokens(m) for n, m in calibration.modules.items()}
                self._note_unweighed(calibration)
            with computing_in(module, self.dtype):
                again()
            for each, quantized in calibration.modules.items():
                error = weight_error(quantized)
                self.result.modules[each] = ModuleResult(error, tokens[each])
            self.output.add(module, name, without)

    def _note_unseen(self, calibration: Calibration) -> None:
        for name in calibration.unseen():
            self.unseen.append(name)
            module: Any = calibration.modules[name]
            scheme = module.quantization_scheme.model_copy(update={"input_activations": None})
            if self.uncalibrated == "weights-only" and scheme.weights is not None:
                module.quantization_scheme = scheme
                self.weights_only_schemes[name] = scheme
                for parameter in [p for p in module._parameters if p.startswith("input_")]:
                    del module._parameters[parameter]

    def _note_unweighed(self, calibration: Calibration) -> None:
        if not self.result.recipe.needs_data:
            return
        for name, _, observer in calibration.observers():
            reason = getattr(observer, "fallback_reason", None)
            if reason is not None:
                self.result.notes.append(f"{name}: its columns weigh alike, since {reason}")

    # -- the end ----------------------------------------------------------------------------

    def raise_unseen(self) -> None:
        left = [name for name in self.unseen if name not in self.weights_only_schemes]
        if not left:
            return
        shown = "\n".join(f"  - {name}" for name in left)
        raise CalibrationError(
            f"{len(left)} modules saw no token of the calibration data, so they have no scale:\n"
            f'{shown}\nUse more samples, or uncalibrated="weights-only" to quantize only their '
            "weights, or add them to ignore."
        )

    def final_config(self, config: QuantizationConfig) -> QuantizationConfig:
        """Return the config that the checkpoint gets; modules of a scheme of their own by name."""
        groups = dict(config.config_groups)
        by_scheme: dict[str, list[str]] = {}
        for name, scheme in self.weights_only_schemes.items():
            by_scheme.setdefault(scheme.model_dump_json(exclude={"targets"}), []).append(name)
        extra = {}
        for i, names in enumerate(by_scheme.values()):
            scheme = self.weights_only_schemes[names[0]]
            extra[f"weights_only_{i}"] = scheme.model_copy(update={"targets": names})
            self.result.notes.append(
                f"{len(names)} modules saw no token; only their weights are quantized: "
                + ", ".join(names)
            )
        return config.model_copy(update={"config_groups": {**extra, **groups}})


def _apply(model: Module, config: QuantizationConfig) -> None:
    """Put schemes and empty parameters on the modules, without a progress bar."""
    quiet = "show_progress" in inspect.signature(apply_quantization_config).parameters
    apply_quantization_config(model, config, **({"show_progress": False} if quiet else {}))
    model.apply(disable_quantization)  # until its calibration, a module runs as it is


def _config_of(recipe: Recipe) -> tuple[QuantizationConfig, bool]:
    """Return the one configuration that the recipe's modifiers amount to."""
    quantizing = [m for m in recipe.modifiers if m.quantization_config() is not None]
    if len(quantizing) != 1:
        raise PlanError(
            f"the recipe has {len(quantizing)} modifiers that quantize; give one, with a "
            "config_group for each scheme"
        )
    config = quantizing[0].quantization_config()
    assert config is not None
    modifier = quantizing[0]
    bypass = isinstance(modifier, QuantizationModifier) and modifier.bypass_divisibility_checks
    return config, not bypass


def _tokenizer(given: Any, source: Source) -> Any:
    from transformers import AutoTokenizer

    if given is not None and not isinstance(given, (str, Path)):
        return given
    folder = given or (source.shards.folder if source.shards is not None else None)
    folder = folder or getattr(source.model, "name_or_path", "") or None
    if folder is None:
        raise DataError("text must be tokenized, and the model came without: pass tokenizer=")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} has no tokenizer that loads ({str(error).splitlines()[0]}); pass "
            "tokenizer=, or token ids as the dataset"
        ) from None


def _device(model: Module) -> torch.device:
    devices: Iterator[torch.device] = (p.device for p in model.parameters())
    return next((d for d in devices if d.type != "meta"), torch.device("cpu"))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known: {nearest(str(value), allowed)}")
