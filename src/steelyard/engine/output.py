"""Writes the tensors of a quantized model to a checkpoint, module by module.

Tensors keep their names in the source. Unquantized ones, known to the class or not, are copied.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch.nn import Module

from steelyard.checkpoint import CheckpointWriter
from steelyard.checkpoint.finite import check_finite, finite_pieces
from steelyard.checkpoint.packed import Packed, pack_module
from steelyard.checkpoint.provenance import RunRecord
from steelyard.data.tokenizer import tokenizer_of
from steelyard.distributed import Ranks
from steelyard.engine.final_check import check_written
from steelyard.errors import PipelineError
from steelyard.formats import DENSE
from steelyard.model.skeleton import own_buffers, parts_of
from steelyard.model.source import Source
from steelyard.model.written_names import as_stored
from steelyard.plan.plan import Plan
from steelyard.plan.written_config import written_config

__all__ = ["Output"]


class Output:
    """Destination of a run's tensors; without a folder, nothing is written.

    format: one format for all quantized weights; None uses that of each scheme
    """

    def __init__(
        self,
        source: Source,
        writer: CheckpointWriter | None,
        tokenizer: Any,
        format: str | None = None,
    ) -> None:
        self.source = source
        self.writer = writer
        self.tokenizer = tokenizer
        self.format = format
        self.done: set[str] = set()  # names in the source that need not be copied
        self.plain: list[str] = []  # weights written unquantized
        self.errors: dict[str, float] = {}  # relative errors of the written weights

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        source: Source,
        folder: str | Path | None,
        overwrite: bool,
        tokenizer: Any,
        identity: dict[str, Any] | None = None,
        resume: bool = True,
        ranks: Ranks | None = None,
        max_shard_bytes: int = 5 * 10**9,
        format: str | None = None,
        keep_tokenizer: bool = False,
    ) -> Iterator[Output]:
        if folder is None:
            yield cls(source, None, tokenizer)
            return
        with CheckpointWriter(
            folder,
            overwrite=overwrite,
            keep_tokenizer=keep_tokenizer,
            max_shard_bytes=max_shard_bytes,
            source=source.origin,
            identity=identity,
            resume=resume,
            ranks=ranks,
        ) as writer:
            if source.shards is None:  # the module may have changed since it was loaded
                writer.source = None
            yield cls(source, writer, tokenizer, format)

    @property
    def progress(self) -> list[dict[str, Any]]:
        """The last marks of an earlier run, one per rank."""
        return [] if self.writer is None else self.writer.progress

    @property
    def was_complete(self) -> bool:
        """Whether an earlier run finished, but was killed before it could report so."""
        return self.writer is not None and self.writer.finished

    def add(
        self,
        root: Module,
        prefix: str,
        without: Module | None,
        owners: Mapping[str, int] | None = None,
        changed: Collection[str] = (),
    ) -> None:
        """Write the quantized modules of `root`, and its other tensors if they are in memory.

        owners:  rank that packs each module; the first rank writes them all
        changed: tensors that a transform changed, by their names in the model
        """
        if self.writer is None:
            return
        ranks, owners = self.writer.ranks, owners or {}
        left_out = set() if without is None else set(without.modules())
        modules = {
            f"{prefix}.{name}".strip("."): module
            for name, module in root.named_modules()
            if module not in left_out
        }
        packed: dict[str, Packed] = {}
        if ranks.count > 1:  # one process packs and writes them one by one
            mine = {p: m for p, m in modules.items() if owners.get(p, 0) == ranks.rank}
            packed = {
                p: own for p, m in mine.items() if (own := pack_module(m, self.format)) is not None
            }
            for theirs in ranks.collect(packed):
                packed.update(theirs)
        for path, module in modules.items():
            if not ranks.is_first:
                self._release(module)
                continue
            parameters = {n: p.data for n, p in module._parameters.items() if p is not None}
            if getattr(module, "quantization_scheme", None) is not None:
                own = packed.pop(path, None)
                parameters = self._add_quantized(path, module, parameters, own, changed)
            parameters.update(own_buffers(module))
            for leaf, value in parameters.items():
                name = f"{path}.{leaf}".strip(".")
                self._add(name, value, name in changed)
            self._release(module)
        self.errors.update(ranks.broadcast({p: e for p, e in self.errors.items() if p in modules}))

    def _add_quantized(
        self,
        path: str,
        module: Module,
        parameters: dict[str, torch.Tensor],
        packed: Packed | None,
        changed: Collection[str],
    ) -> dict[str, torch.Tensor]:
        """Write the stored tensors of a quantized module; return its other parameters."""
        scheme: Any = module.quantization_scheme
        weight = parameters.pop("weight", None)
        bias = {"bias": parameters.pop("bias")} if "bias" in parameters else {}
        assert self.writer is not None
        if weight is None:  # attention: scales of its states
            if self.format == DENSE:
                return bias
            for leaf, value in parameters.items():
                if not (leaf.endswith("zero_point") and scheme.input_activations.symmetric):
                    self.writer.add(self.source.key(f"{path}.{leaf}"), value)
            return bias
        stored, error = packed or pack_module(module, self.format) or ({}, None)
        if error is not None:
            self.errors[path] = error
        key = self.source.key(f"{path}.weight")
        if self.source.shards is not None and key not in self.source.shards:
            raise PipelineError(
                f"{path}.weight has no name in {self.source.shards.folder}; add {path} to ignore"
            )
        self.done.add(key)
        if f"{path}.weight" in changed and self.source.shards is not None:
            self.writer.claim([key])
        for leaf, value in stored.items():
            self.writer.add(self.source.key(f"{path}.{leaf}"), value)
        return bias

    def _add(self, name: str, value: torch.Tensor, changed: bool) -> None:
        """Write an unquantized tensor from memory; tensors in files are copied at the end."""
        if self.source.shards is not None and not changed:
            return
        tied = getattr(self.source.model, "all_tied_weights_keys", None) or {}
        if name in tied or name in self.done:
            return
        self.done.add(name)
        assert self.writer is not None
        # tensors that the class stacked on loading, such as experts, are saved separately
        parts = {} if name in self.source.keys else parts_of(self.source.model, name, value)
        for original, tensor in (parts or {self.source.key(name): value}).items():
            if changed and self.source.shards is not None:
                self._claim(original)
            self._add_plain(original, tensor)

    def _claim(self, key: str) -> None:
        """Record that a tensor of the source was changed."""
        shards, writer = self.source.shards, self.writer
        assert shards is not None and writer is not None
        if key not in shards:
            raise PipelineError(
                f"a modifier changed {key}, but {shards.folder} has no tensor of that name; "
                "remove it from the modifier's targets"
            )
        self.done.add(key)
        writer.claim([key])

    def _add_plain(self, name: str, tensor: torch.Tensor) -> None:
        assert self.writer is not None
        tensor = as_stored(tensor, name, self.source.loaded_from)
        check_finite(name, tensor)
        self.writer.add(name, tensor)
        self._note_plain(name, tensor.ndim)

    def _note_plain(self, name: str, dimensions: int) -> None:
        if dimensions == 2 and name.endswith(".weight"):
            self.plain.append(name.removesuffix(".weight"))

    def _release(self, module: Module) -> None:
        """Free the scales of a module that was loaded from a file."""
        if self.source.shards is None:
            return
        for leaf, parameter in module._parameters.items():
            if parameter is not None and leaf.endswith(("scale", "zero_point")):
                meta = torch.nn.Parameter(parameter.data.to("meta"), requires_grad=False)
                module._parameters[leaf] = meta

    def finish(
        self,
        config: QuantizationConfig,
        recipe: str,
        modules: Mapping[str, Any],
        plan: Plan,
        progress: dict[str, Any] | None = None,
        add_files: Callable[[Path], object] = bool,
        complete: Callable[[Path], object] = bool,
        record: Callable[[], RunRecord] | None = None,
    ) -> Path | None:
        """Copy the remaining tensors, write the configuration, and validate the checkpoint.

        progress:  the last mark, for a run that resumes before the checkpoint is in place
        add_files: called with the folder once it is valid, to add more files
        complete:  called with the folder before that, when all tensors are written
        record:    returns what provenance.json states about the run
        """
        if self.writer is None or self.writer.finished:
            return None if self.writer is None else self.writer.output_dir
        shards = self.source.shards
        if shards is not None:
            for name in shards.names():
                if name not in self.done:
                    self._note_plain(name, len(shards.info(name).shape))
                    if name not in self.writer:
                        self.writer.copy(name, shards, finite_pieces(name, shards))
            self.writer.mark(progress or {})
            self.writer.carry(shards)
            self._carry_tokenizer()
        else:
            self._carry_from_model()
        self.writer.write_text("recipe.yaml", recipe)
        if self.format == DENSE:  # no scheme to validate against, and no report
            content = self.source.config()
            if plan.quantized:
                content.pop("quantization_config", None)
            return self.writer.finish(content, run=record)
        content = written_config(self.source, config, plan, self.plain, self.format)
        as_planned, changed = self.format is None and config == plan.config, self.writer.changed

        def check(folder: Path) -> None:
            complete(folder)
            check_written(folder, content, self.source, config, plan, modules, changed, as_planned)
            add_files(folder)

        return self.writer.finish(content, check, run=record)

    def _carry_from_model(self) -> None:
        """Write the files of a loaded model: those of its folder, its generation config."""
        assert self.writer is not None
        origin = self.source.origin
        if origin is not None and (origin / "config.json").is_file():
            self.writer.carry_files(origin)
        generation = getattr(self.source.model, "generation_config", None)
        if generation is not None:
            with tempfile.TemporaryDirectory() as temporary:
                generation.save_pretrained(temporary)
                self.writer.carry_files(Path(temporary))
        self._carry_tokenizer()

    def _carry_tokenizer(self) -> None:
        """Write the tokenizer passed by the caller, if any."""
        assert self.writer is not None
        given = self.tokenizer
        if given is None:
            return
        if isinstance(given, (str, Path)) and Path(given).is_dir():
            self.writer.carry_tokenizer(Path(given))
            return
        with tempfile.TemporaryDirectory() as temporary:
            tokenizer_of(given, self.source).save_pretrained(temporary)
            self.writer.carry_files(Path(temporary))
