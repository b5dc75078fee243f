"""Reads a quantized checkpoint as plain weights, as a server reconstructs them.

Names, types and shapes are those of an unquantized checkpoint, so code that reads one reads this
too. Scales of activations and of the cache are unchanged. A weight that lacks a tensor is refused
when the folder is opened: servers load it and generate garbage.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from compressed_tensors.base import QUANTIZATION_METHOD
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from steelyard.checkpoint.view import CheckpointView
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import CheckpointError
from steelyard.foreign import reason_of
from steelyard.formats import DENSE, expected_tensors, format_of
from steelyard.formats.served_rotation import ServedRotation, served_rotations
from steelyard.formats.tensor_names import WEIGHT, base_of, stores_codes
from steelyard.kernels.rotation import Rotation

__all__ = ["DecodedView"]


class DecodedView(CheckpointView):
    """`CheckpointView` that reads compressed-tensors checkpoints as well; weights read as fp32.

    quantization: the configuration; None where compressed-tensors stores nothing
    schemes:      scheme of each module with a quantized weight
    """

    quantization: QuantizationConfig | None = None
    served: list[ServedRotation]  # rotations that a server applies
    schemes: dict[str, QuantizationScheme]
    _written: WrittenCheckpoint

    def _decode(self, quantization: dict[str, Any]) -> None:
        method = quantization.get("quant_method")
        if method == "fp8":  # blocks with a scale each
            super()._decode(quantization)
            return
        if method != QUANTIZATION_METHOD:
            raise CheckpointError(
                f"{self.folder} is quantized with {method!r}, which is not read here; pass a "
                f"checkpoint of {QUANTIZATION_METHOD}, or one that is not quantized"
            )
        sparsity = quantization.get("sparsity_config")
        if sparsity and sparsity.get("format") != DENSE:
            raise CheckpointError(
                f"{self.folder}: config.json has a sparsity_config, which is not read here; only "
                "quantization is"
            )
        self.served = self._rotations(quantization.get("transform_config") or {})
        self._written = WrittenCheckpoint(self.folder, None)
        self.quantization = self._written.quantization
        self.schemes = {}
        for module, leaves in self._written.tensors.items():
            if self._is_quantized(module, leaves):
                self.schemes[module] = self._checked(module, leaves)
                self._replace(module, leaves)

    def _rotations(self, config: Any) -> list[ServedRotation]:
        try:
            return list(served_rotations(config))
        except (ValueError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder}: config.json has a transform_config, which is not read here "
                f"({reason_of(error)}); only Hadamard rotations of inputs and outputs are"
            ) from error

    def matrix(self, rotation: ServedRotation, size: int) -> Rotation:
        """Return a rotation as stored: one matrix of each size, beside any module."""
        for name in self.names():
            if name.endswith(f".{rotation.leaf}.{WEIGHT}") and self.info(name).shape[0] == size:
                return Rotation(size, (self.read(name).double() / size**0.5,))
        raise CheckpointError(
            f"{self.folder} holds no matrix of {size} channels for {rotation.leaf}, which "
            "config.json asks for; quantize the model again"
        )

    def _is_quantized(self, module: str, leaves: set[str]) -> bool:
        if stores_codes(leaves):
            return True
        return WEIGHT in leaves and self.info(f"{module}.weight").dtype.itemsize == 1

    def _checked(self, module: str, leaves: set[str]) -> QuantizationScheme:
        """Return the scheme of a module if the stored tensors fit it."""
        scheme = self._written.schemes.get(module)
        if scheme is None or scheme.weights is None:
            raise CheckpointError(
                f"{self.folder} holds codes for {module}, but config.json has no scheme for its "
                "weight; quantize the model again"
            )
        if format_of(scheme) == DENSE:
            raise CheckpointError(
                f"{self.folder} holds {module} unquantized, with its scales (format {DENSE!r}); "
                "save it compressed, as it is served"
            )
        try:
            shape = self._written.shape(module)
            needed = expected_tensors(scheme, shape, torch.float32)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {module}: {error}") from error
        for leaf, (_, wanted) in sorted(needed.items()):
            if leaf != WEIGHT and base_of(leaf) != WEIGHT:
                continue
            if leaf not in leaves:
                raise CheckpointError(
                    f"{self.folder} has no {module}.{leaf}, without which {module} cannot be "
                    "decoded; a server would generate garbage, so quantize the model again"
                )
            found = self.info(f"{module}.{leaf}").shape
            if math.prod(found) != math.prod(wanted):  # else it might broadcast
                raise CheckpointError(
                    f"{self.folder}: {module}.{leaf} is {found}, but its scheme in config.json "
                    f"implies {wanted}; quantize the model again"
                )
        return scheme

    def _replace(self, module: str, leaves: set[str]) -> None:
        """Replace the stored tensors of a weight by the weight."""
        shape = self._written.shape(module)
        stored = [leaf for leaf in leaves if base_of(leaf) == WEIGHT]
        info = self.info(f"{module}.{stored[0]}")
        for leaf in stored:
            del self._infos[f"{module}.{leaf}"]
        name = f"{module}.weight"
        nbytes = torch.Size(shape).numel() * torch.float32.itemsize
        self._infos[name] = replace(
            info, name=name, dtype=torch.float32, shape=shape, nbytes=nbytes
        )
        self._made[name] = partial(self._weight, module)

    def _weight(self, module: str) -> torch.Tensor:
        whole = torch.empty(self._written.shape(module), dtype=torch.float32)
        for start, rows in self._written.decode(module):
            whole[start : start + len(rows)] = rows
        return whole
