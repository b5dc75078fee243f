"""A checkpoint as its own files describe it: the scheme of each module, and its decoded weight.

It uses only config.json and the names of the tensors, as a server does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from compressed_tensors.base import TRANSFORM_CONFIG_NAME
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import match_name

from steelyard.checkpoint.config_file import check_patterns, named_dtype, read_quantization
from steelyard.checkpoint.patterns import PREFIX
from steelyard.checkpoint.shards import Shards
from steelyard.checkpoint.stored_weight import StoredWeight
from steelyard.errors import CheckpointError
from steelyard.formats.original_shape import original_shape
from steelyard.formats.served_rotation import rotation_modules
from steelyard.formats.table import is_layout
from steelyard.formats.tensor_names import SCALE, WEIGHT, is_parameter, weight_tensors

__all__ = ["WrittenCheckpoint", "likely_class"]

_AT_ONCE = 1 << 22  # weights to decode
_EMBEDDING = re.compile(r"embed|wte|wpe")


class WrittenCheckpoint:
    """A checkpoint's tensors by module, and the scheme of each module that has one."""

    def __init__(
        self,
        folder: Path,
        source: Shards | None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.dtypes = dtypes or {}
        self.config, self.quantization = read_quantization(folder)
        self.shards = Shards(folder)
        self.source = source
        self.tensors: dict[str, set[str]] = {}
        self._formatted: dict[int, QuantizationScheme] = {}
        for name in self.shards:
            module, _, local = name.rpartition(".")
            self.tensors.setdefault(module, set()).add(local)
        check_patterns(folder, self.quantization, self.tensors)
        ignore = self.quantization.ignore or ()
        self._ignored = set(ignore)  # may hold 100,000 names
        transforms = self.config["quantization_config"].get(TRANSFORM_CONFIG_NAME) or {}
        self._matrices = rotation_modules(transforms)  # endings of modules that hold rotations
        self._patterns = [entry for entry in ignore if entry.startswith(PREFIX)]
        self.schemes = {
            module: scheme
            for module in self.tensors
            if (scheme := self.scheme_of(module)) is not None and self._can_be_quantized(module)
        }

    def scheme_of(self, module: str) -> QuantizationScheme | None:
        """The scheme of a module; None if the config ignores it, or no target matches."""
        return None if self.is_ignored(module) else self.targeted(module)

    def is_ignored(self, module: str) -> bool:
        return module in self._ignored or any(match_name(module, p) for p in self._patterns)

    def targeted(self, module: str) -> QuantizationScheme | None:
        """The scheme whose target matches: by name, else by a pattern, else by the likely class."""
        classes = [likely_class(module)]
        if any(map(is_parameter, self.tensors[module])):
            classes.append("Linear")  # a Linear may be called an embedding
        groups = self.quantization.config_groups.values()
        for scheme in sorted(groups, key=lambda s: module not in s.targets):
            if any(match_name(module, target) for target in scheme.targets):
                return self._with_format(scheme)
        for class_name in classes:
            for scheme in groups:
                if class_name in scheme.targets:
                    return self._with_format(scheme)
        return None

    def _with_format(self, scheme: QuantizationScheme) -> QuantizationScheme:
        """Return a scheme with its format, by default that of the whole checkpoint."""
        overall = self.quantization.format
        if scheme.format is not None or not is_layout(overall):
            return scheme
        if id(scheme) not in self._formatted:  # one object for all modules of a group
            self._formatted[id(scheme)] = scheme.model_copy(update={"format": overall})
        return self._formatted[id(scheme)]

    def _can_be_quantized(self, module: str) -> bool:
        if self._matrices and module.endswith(self._matrices):
            return False
        if any(map(is_parameter, self.tensors[module])):
            return True
        plain = f"{module}.{WEIGHT}"
        return plain in self.shards and len(self.shards.info(plain).shape) == 2

    def shape(self, module: str) -> tuple[int, int]:
        """The original shape of the weight, from the source or else from the stored tensors."""
        plain = f"{module}.{WEIGHT}"
        if self.source is not None and plain in self.source:
            rows, columns = self.source.info(plain).shape
            return rows, columns
        stored = {n: self.shards.info(f"{module}.{n}").shape for n in self.tensors[module]}
        shape = original_shape(
            stored, self.schemes[module].weights, lambda n: self.shards.read(f"{module}.{n}")
        )
        if shape is None:
            raise CheckpointError("it has no weight, and no tensor that determines its shape")
        return shape

    def dtype(self, module: str) -> torch.dtype:
        """The original type of the weight."""
        plain, scale = f"{module}.{WEIGHT}", f"{module}.{SCALE}"
        if self.cast is not None:
            return self.cast
        if self.source is not None and plain in self.source:
            return self.source.info(plain).dtype
        if module in self.dtypes:
            return self.dtypes[module]
        if (dtype := named_dtype(self.config)) is not None:
            return dtype
        stored = self.shards.info(scale).dtype if scale in self.shards else torch.uint8
        return stored if stored.itemsize > 1 else torch.bfloat16  # one byte is a code of the format

    @cached_property
    def cast(self) -> torch.dtype | None:
        """The type that another tool loaded the whole source in; None if it kept the types.

        Then config.json names it, and every unquantized tensor has it.
        """
        named = named_dtype(self.config)
        if self.source is None or named is None:
            return None
        pairs = [
            (self.source.info(name).dtype, self.shards.info(name).dtype)
            for name in self.source
            if name in self.shards and name.rpartition(".")[0] not in self.schemes
        ]
        floats = [(before, now) for before, now in pairs if before.is_floating_point]
        kept = all(before == named for before, _ in floats)
        return None if kept or any(now != named for _, now in floats) else named

    def stored(self, module: str) -> StoredWeight:
        """Return the quantized weight of a module, to be read a few rows at a time."""
        names = weight_tensors(self.tensors[module])
        return StoredWeight(self.shards, module, names, self.schemes[module], self.shape(module))

    def decode(self, module: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the weight that a server reconstructs, fp32, some rows at a time with the index of
        the first: unpacked at once it would take many times its size."""
        stored = self.stored(module)
        rows, columns = stored.shape
        step = max(stored.unit, _AT_ONCE // max(columns, 1) // stored.unit * stored.unit)
        for start in range(0, rows, step):
            yield start, stored.decode(stored.part(start, min(start + step, rows)))


def likely_class(module: str) -> str:
    """Return the class that a module's name suggests: Embedding or Linear."""
    return "Embedding" if _EMBEDDING.search(module.rpartition(".")[2]) else "Linear"
