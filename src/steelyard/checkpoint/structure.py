"""Checks that a checkpoint holds exactly the tensors that its config requires."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from compressed_tensors.base import QUANTIZATION_METHOD

from steelyard.checkpoint.config_file import text_config
from steelyard.checkpoint.shard_index import INDEX
from steelyard.checkpoint.shards import Shards
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.foreign import show
from steelyard.formats import (
    TensorSpec,
    expected_attention_tensors,
    expected_tensors,
    stored_as,
)
from steelyard.formats.tensor_names import SCALE, WEIGHT, is_parameter, is_state_parameter
from steelyard.fusion import shared_parameters

__all__ = ["Structure"]

_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks))\.(\d+)\.")
_TEXT_STACK = re.compile(r"(?:model|transformer|language_model|decoder|\.)*(?:layers|h|blocks)")
_KEYS = re.compile(r"k_proj|kv_b_proj|qkv|query_key_value|c_attn|Wqkv", re.IGNORECASE)
_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers")


class Structure:
    """Checks names, types and shapes.

    broken: modules that cannot be decoded, filled by `tensors`
    """

    def __init__(self, written: WrittenCheckpoint) -> None:
        self.written = written
        self.shards: Shards = written.shards
        self.broken: set[str] = set()

    def tensors(self) -> Iterator[str]:
        """Yield tensors of a scheme that are missing or differ, and tensors of no scheme."""
        written = self.written
        cache = written.quantization.kv_cache_scheme
        if not written.schemes and cache is None and not self.states():
            yield f"{self.shards.folder} has a quantization_config but no quantized module"
        for module, locals_ in written.tensors.items():
            found = {local for local in locals_ if is_parameter(local)}
            scheme = written.schemes.get(module)
            if scheme is None:
                for local in sorted(found):
                    yield f"{module}.{local} exists, but the config does not quantize {module}"
                continue
            try:
                expected = expected_tensors(scheme, written.shape(module), written.dtype(module))
            except ValueError as error:
                self.broken.add(module)
                yield f"{module}.weight does not fit its scheme: {error}"
                continue
            yield from self._compare(module, expected)
            for local in sorted((found | (locals_ & {WEIGHT})) - expected.keys()):
                format = stored_as(scheme)
                yield (
                    f"{module}.{local} is left over: {format.name} ({format.description}) does not "
                    "hold it"
                )

    def _compare(self, module: str, expected: Mapping[str, TensorSpec]) -> Iterator[str]:
        for local, (dtype, shape) in expected.items():
            name = f"{module}.{local}"
            info = self.shards.info(name) if name in self.shards else None
            if info is not None and (info.dtype, info.shape) == (dtype, shape):
                continue
            self.broken.add(module)
            found = f"{info.dtype} {info.shape}" if info is not None else "missing"
            yield f"{name} is {found}; expected {dtype} {shape}"

    # -- the cache ----------------------------------------------------------------------------

    def states(self) -> dict[str, set[str]]:
        """Modules with parameters of attention's states, and their names."""
        return {
            module: names
            for module, locals_ in self.written.tensors.items()
            if (names := {local for local in locals_ if is_state_parameter(local)})
        }

    def cache(self) -> Iterator[str]:
        """Yield missing scales of a quantized KV cache: all layers have them, or none."""
        args = self.written.quantization.kv_cache_scheme
        found = self.states()
        if args is not None and not found and args.dynamic is not True:
            yield "k_scale and v_scale are missing, but the config has a static kv_cache_scheme"
        heads = self._text().get("num_key_value_heads") or self._text().get("num_attention_heads")
        for module in found:
            if args is not None:
                count = heads if isinstance(heads, int) else 1
                dtype = self.written.dtype(module)
                yield from self._compare(module, expected_attention_tensors(args, dtype, count))
        for module in sorted(self._attention(found) - found.keys()):
            yield f"{module} has no k_scale and v_scale, but {next(iter(found))} has"

    def _attention(self, found: Mapping[str, set[str]]) -> set[str]:
        """Return the modules of other layers that correspond to those with scales."""
        kinds = {_kind(module) for module in found}
        holders = {name for name in self.written.tensors if _KEYS.search(name.rpartition(".")[2])}
        return {parent for name in holders if _kind(parent := name.rpartition(".")[0]) in kinds}

    # -- fusion -------------------------------------------------------------------------------

    def fusion(
        self, modules: tuple[str, ...], requantized: list[str] | None = None
    ) -> Iterator[str]:
        """Yield fused modules with different schemes, or different values of a shared scale.

        requantized: receives per-tensor weight scales that differ. vLLM then quantizes the layer
                     again with the largest, so another tool need not have shared them; None yields
                     them too
        """
        schemes = [self.written.schemes.get(module) for module in modules]
        first = schemes[0]
        for module, scheme in zip(modules, schemes, strict=True):
            if (scheme is None) != (first is None):
                yield f"{module} is fused with {modules[0]}, but only one of them is quantized"
                return
        if first is None:
            return
        for local in shared_parameters(first):
            differing = list(self._differing([f"{module}.{local}" for module in modules]))
            if differing and local == SCALE and requantized is not None:
                requantized.append(f"{modules[0]}.{local}")
            else:
                yield from differing

    def _differing(self, names: list[str]) -> Iterator[str]:
        values = {
            name: self.shards.read(name).float().flatten().tolist()
            for name in names
            if name in self.shards
        }
        for name, value in values.items():
            other = next(iter(values))
            if value != values[other]:
                yield f"{name} is {value}, but its fused partner {other} is {values[other]}"

    # -- the config ---------------------------------------------------------------------------

    def config(self) -> Iterator[str]:
        """Yield settings of config.json that contradict the tensors."""
        raw = self.written.config.get("quantization_config")
        method = raw.get("quant_method") if isinstance(raw, dict) else None
        if method != QUANTIZATION_METHOD:
            yield (
                f"config.json: quantization_config has quant_method {show(method)}, so a server "
                f"does not know the format; expected {QUANTIZATION_METHOD!r}"
            )
        yield from self._layers()
        yield from self._widths()
        if not (self.shards.folder / INDEX).exists():
            for path in self.shards.unread:
                if not path.name.startswith("consolidated"):
                    yield (
                        f"{path.name} is next to model.safetensors, and servers load both; "
                        "remove it"
                    )

    def _layers(self) -> Iterator[str]:
        wanted = self._text().get("num_hidden_layers")
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            return
        stacks: dict[str, set[int]] = {}
        for module in self.written.tensors:
            match = _LAYER.match(f"{module}.")
            if match and _TEXT_STACK.fullmatch(match[1]):
                stacks.setdefault(match[1], set()).add(int(match[2]))
        if len(stacks) != 1:  # no known stack, or an encoder and a decoder
            return
        (stack, numbers), *_ = stacks.items()
        extra = sum(n for key in _EXTRA_LAYERS if isinstance(n := self._text().get(key), int))
        # a source may hold layers that its class does not use; a run copies them unchanged
        used = [number for number in numbers if number < wanted + extra] or [0]
        used += [n for n in numbers if self._quantizes(f"{stack}.{n}.")]
        if not wanted <= max(used) + 1 <= wanted + extra:
            yield (
                f"config.json: num_hidden_layers is {wanted}, but the files hold {stack}.0 to "
                f"{stack}.{max(numbers)}"
            )
        elif (gaps := set(range(wanted)) - numbers) and "block_configs" not in self._text():
            yield f"{stack}.{min(gaps)} is missing: no tensor has that name"

    def _quantizes(self, prefix: str) -> bool:
        return any(module.startswith(prefix) for module in self.written.schemes)

    def _widths(self) -> Iterator[str]:
        """Yield sizes of the embedding that contradict the config, if it has the usual name."""
        text = self._text()
        names = [n for n in self.shards if re.fullmatch(r"[\w.]*\bembed_tokens\.weight", n)]
        if len(names) != 1 or {"word_embed_proj_dim", "embedding_size"} & text.keys():
            return
        shape = self.shards.info(names[0]).shape
        for size, key in zip(shape, ("vocab_size", "hidden_size"), strict=False):
            wanted = text.get(key)
            if not isinstance(wanted, int):
                continue
            # an embedding may have more rows, for special tokens or as padding
            fits = size >= wanted if key == "vocab_size" else size == wanted
            if not fits:
                yield f"config.json: {key} is {wanted}, but {names[0]} is {shape}"

    def _text(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        return text_config(self.written.config)


def _kind(module: str) -> str:
    """Return the name of a module without the numbers in it."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))
