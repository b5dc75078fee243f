"""Output errors of a block right after it is solved: of each module, and of the block as a whole.

The first `TOKENS` tokens of the run's first batch pass the block once before anything is solved,
and are kept at each module. Later each module computes them as it is stored, and the block runs
them again. The errors are relative to what the unquantized modules put out, and to what the
unquantized block adds to its input. Algorithms that know the output error of a module from
second moments over all batches, as GPTQ does, have stated it already.

Both runs are in fp32, which costs more than twice as much as bf16 where the processor multiplies
bf16: with all tokens of the batch they took a third of a run with 16 samples. A batch with padding,
or of a layer whose call cannot be cut, passes as a whole.

One rank has the first batch, so the number of ranks changes no figure. What is kept waits in host
memory. Where a device has no room for the batch, the block has no figures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch.nn import Linear, Module

from steelyard.algorithms import ModuleResult
from steelyard.distributed import ThreadPool
from steelyard.engine.block_names import BLOCK_ERROR, OUTPUT_ERROR
from steelyard.engine.parts import Flow, Part
from steelyard.engine.solving import Solver
from steelyard.model.early_stop import StopForward
from steelyard.model.first_tokens import first_tokens
from steelyard.model.placeholders import first_tensor, replaced
from steelyard.model.precision import computing_in, multiplying_in, rounded_once
from steelyard.observers.lifecycle import with_schemes
from steelyard.observers.padding import padding_mask, real_tokens, without_padding

__all__ = ["TOKENS", "BlockOutputs"]

TOKENS = 128


class BlockOutputs:
    """The first batch at a block that is about to be solved.

    dtype: the type to compute in; None for that of the model
    """

    def __init__(
        self, part: Part, flow: Flow, solver: Solver, pool: ThreadPool, dtype: torch.dtype | None
    ) -> None:
        self.part = part
        self.solver = solver
        self.pool = pool
        self.dtype = dtype
        self.inputs: dict[str, torch.Tensor] = {}
        self._wanted: dict[
            str, torch.Tensor
        ] = {}  # what the modules put out in fp32, less the bias
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._padding: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        if flow.forwards and flow.places[0][0] == 0 and not solver.statistics.only:
            try:
                self._watch(flow)
            except torch.OutOfMemoryError:
                self._forget()

    def _forget(self) -> None:
        self.inputs.clear()
        self._wanted.clear()
        self._call = self._output = None

    def _watch(self, flow: Flow) -> None:
        if flow.collect is None or not self._keep_call(flow):
            with self._watched(), computing_in(self.part.root, self.dtype):
                self._run(flow.forwards[0])
            return
        cut = None if self._padding is not None else first_tokens(self._call, TOKENS)
        for call in (cut, self._call):
            # A forward that needs all tokens may raise anything if some are cut off. If it fails
            # with all of them too, the run is about to say so.
            with contextlib.suppress(Exception):
                if call is not None and self._output is None:
                    self._first_output(call)
        if self._output is None:
            self._forget()

    def _keep_call(self, flow: Flow) -> bool:
        """Keep the block's arguments for the first batch; False if they cannot be used twice."""

        def called(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._call = (args, dict(kwargs))
            self._padding = padding_mask()
            raise StopForward

        root = self.part.root
        handle = root.register_forward_pre_hook(called, with_kwargs=True, prepend=True)
        try:
            with contextlib.suppress(StopForward):
                self._run(flow.forwards[0])
        finally:
            handle.remove()
        if self._call is not None and not all(map(_is_plain, self._call)):
            self._call = None
        return self._call is not None

    def _first_output(self, call: Any) -> None:
        """Run a call of the unquantized block, and keep it and the inputs of its modules."""
        self._call = replaced(call, _on_host)
        with self._watched(self._wanted), self._in_fp32():
            self._output = self._block_output()

    @contextlib.contextmanager
    def _watched(self, outputs: dict[str, torch.Tensor] | None = None) -> Iterator[None]:
        """Keep the first inputs of the modules inside the context.

        outputs: receives what each puts out, if it computes in fp32
        """
        modules: dict[str, Any] = dict(self._modules())
        names = {module: name for name, module in modules.items() if isinstance(module, Linear)}
        self.inputs.clear()

        def seen(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
            x, name = args[0], names[module]
            rows = real_tokens(x, "input").detach().reshape(-1, x.shape[-1])
            if not len(rows) or name in self.inputs:
                return
            self.inputs[name] = _spread_out(rows)
            if outputs is not None:
                found = real_tokens(output, "output").detach().reshape(-1, output.shape[-1])
                found = _spread_out(found)
                outputs[name] = found if module.bias is None else found - module.bias.cpu()

        with contextlib.ExitStack() as hooks:
            for module in names:
                hooks.callback(module.register_forward_hook(seen).remove)
            yield

    def _modules(self) -> Mapping[str, Module]:
        return with_schemes(self.part.root, self.part.name, self.part.without)

    def _run(self, forward: Any) -> Any:
        """Run a call in the pool, where the number of threads does not change its result."""

        def call() -> Any:
            with torch.no_grad(), without_padding(self._padding):
                return forward()

        return self.pool.do([(0, call)])[0]

    @contextlib.contextmanager
    def _in_fp32(self, quantized: Iterable[Module] = ()) -> Iterator[None]:
        """Compute the block in fp32: bf16 would round a large hidden state by more than the error.

        quantized: modules to run as they are stored
        """
        with (
            multiplying_in(self.part.root, None),
            computing_in(self.part.root, torch.float32, scales=True),
            rounded_once(quantized),
        ):
            yield

    def _block_output(self) -> torch.Tensor:
        """Run the kept call."""
        assert self._call is not None
        args, kwargs = (replaced(each, self._brought) for each in self._call)
        call = functools.partial(self.part.root, *args, **kwargs)
        found: torch.Tensor = first_tensor(self._run(call))
        return found.cpu()

    def _brought(self, value: Any) -> Any:
        """Bring a tensor to the device that the block is on, in fp32."""
        if not isinstance(value, torch.Tensor):
            return value
        return _wide(value.to(self.solver.device))

    @torch.no_grad()
    def added_to(self, found: Mapping[str, ModuleResult]) -> dict[str, ModuleResult]:
        """Return the results of the block's modules, with output errors where they are known.

        Every rank calls this, and gets the same.
        """
        try:
            known = dict(self._errors(found))
        except torch.OutOfMemoryError:
            known = {}
        self._forget()
        errors = self.solver.ranks.broadcast(known)
        block = errors.pop("", None)
        added = {name: {OUTPUT_ERROR: error} for name, error in errors.items()}
        if block is not None:
            for name in found:
                added[name] = {**added.get(name, {}), BLOCK_ERROR: block}
        return {
            name: replace(result, details={**result.details, **added.get(name, {})})
            for name, result in found.items()
        }

    def _errors(self, found: Mapping[str, ModuleResult]) -> Iterator[tuple[str, float]]:
        """Yield the output errors of modules, and under an empty name that of the block."""
        modules: dict[str, Any] = dict(self._modules())
        measured = [name for name in self.inputs if self._is_measured(name, modules, found)]
        for name in measured:
            if name not in self._wanted:
                self._wanted[name] = self._run(functools.partial(self._product, name, modules))
        runs = self._output is not None and self._call is not None and bool(modules)
        if not (measured or runs):
            return
        with self._in_fp32(modules.values()):
            for name in measured:
                stored = self._run(functools.partial(self._product, name, modules, True))
                error = _relative(stored, self._wanted[name], self._wanted[name])
                if error is not None:
                    yield name, error
            output = self._block_output() if runs else None
        if output is None or self._output is None or self._call is None:
            return
        args, kwargs = self._call
        hidden = args[0] if args else next(iter(kwargs.values()))
        added = self._output
        if isinstance(hidden, torch.Tensor) and hidden.shape == added.shape:
            added = added - hidden
        if (error := _relative(output, self._output, added)) is not None:
            yield "", error

    def _is_measured(
        self, name: str, modules: Mapping[str, Module], found: Mapping[str, ModuleResult]
    ) -> bool:
        """Whether to compute the output error of a module.

        A weight that was changed in place cannot be compared any more.
        """
        known = name in found and name in modules and name not in self.solver.adapted
        return known and found[name].details.get(OUTPUT_ERROR) is None

    def _product(
        self, name: str, modules: Mapping[str, Any], quantized: bool = False
    ) -> torch.Tensor:
        """Return what a module puts out for its inputs, less the bias, in fp32.

        quantized: round its input as it is served
        """
        module, weight = modules[name], modules[name].weight.data.float()
        x, scheme = self.inputs[name].to(weight.device).float(), module.quantization_scheme
        if quantized and scheme.input_activations is not None:
            x = forward_quantize(module, x[None], "input", scheme.input_activations)[0].float()
        product: torch.Tensor = x @ weight.T
        return product.cpu()


def _spread_out(x: torch.Tensor) -> torch.Tensor:
    """Return at most `TOKENS` rows, at equal distances."""
    if len(x) > TOKENS:
        x = x[torch.linspace(0, len(x) - 1, TOKENS, device=x.device).long()]
    return x.to("cpu", copy=True)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_narrow else value


def _is_plain(value: Any) -> bool:
    """Whether a call with this value can be repeated: no object that the block changes."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str))


def _relative(found: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> float | None:
    """Return the squared error over the square of `size`; None if that is zero."""
    noise = float((found - wanted).double().square().sum())
    signal = float(size.double().square().sum())
    return noise / signal if signal else None
