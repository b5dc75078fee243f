"""Compares how vLLM will read each module with how it is stored.

vLLM loads a tensor that it does not expect, or misses one that it does, often without an error; the
layer then computes with uninitialized or misread weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compressed_tensors.quantization import QuantizationScheme

from steelyard.checkpoint.findings import WARNING, Finding
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.doctor.vllm_rules import ServedLayer, Unservable, VllmConfig, vllm_layers
from steelyard.doctor.vllm_schemes import check_cache, vllm_scheme
from steelyard.formats import describe_args
from steelyard.formats.tensor_names import WEIGHT, holds_values, is_parameter, stores_codes

__all__ = ["Served", "serving"]

UNQUANTIZED = "unquantized"


@dataclass(frozen=True)
class Served:
    """A layer and the implementation that vLLM uses for it."""

    layer: ServedLayer
    scheme: str


def serving(written: WrittenCheckpoint) -> tuple[list[Served], list[Finding]]:
    """Return the implementation of each layer, and the layers that vLLM would misread."""
    served: list[Served] = []
    found = list(_settings(written))
    config = VllmConfig(written.quantization)
    names = {}
    for module, leaves in written.tensors.items():
        if _has_matrix(written, module, leaves):
            try:
                names[module] = _implementation(written, written.schemes.get(module))
            except Unservable as error:
                names[module] = UNQUANTIZED
                found.append(Finding("kernel", f"{module}: {error}"))
    for layer in vllm_layers(names):
        try:
            scheme = config.scheme_of(layer)
            served.append(Served(layer, _implementation(written, scheme)))
        except Unservable as error:
            if all(names[part] == UNQUANTIZED for part in layer.parts):
                continue  # reported above, or never quantized
            found.append(Finding("fused" if len(layer.parts) > 1 else "kernel", str(error)))
            continue
        found += _misread(written, layer, scheme)
    return served, found


def _has_matrix(written: WrittenCheckpoint, module: str, leaves: set[str]) -> bool:
    if any(map(is_parameter, leaves)):
        return any(map(holds_values, leaves)) or stores_codes(leaves)
    name = f"{module}.{WEIGHT}"
    return WEIGHT in leaves and len(written.shards.info(name).shape) == 2


def _implementation(written: WrittenCheckpoint, scheme: QuantizationScheme | None) -> str:
    if scheme is None:
        return UNQUANTIZED
    return vllm_scheme(scheme, str(scheme.format or written.quantization.format))


def _misread(
    written: WrittenCheckpoint, layer: ServedLayer, scheme: QuantizationScheme | None
) -> Iterator[Finding]:
    """Yield the parts of a layer that are stored in another way than vLLM will read them."""
    for part in layer.parts:
        codes = any(map(is_parameter, written.tensors[part]))
        stored = written.schemes.get(part)
        whole = layer.name if layer.name != part else ""
        as_part = f" as part of {whole}" if whole else ""
        if scheme is None and codes:
            yield Finding(
                "served",
                f"{part} holds codes, but vLLM looks it up{as_part}, finds no scheme, and loads it "
                "unquantized",
            )
        elif scheme is not None and not codes and stored is None:
            yield Finding(
                "served",
                f"{part} is not quantized, but vLLM reads it{as_part} as {_words(scheme)}",
            )
        elif scheme is not None and stored is not None and not _alike(scheme, stored):
            yield Finding(
                "served",
                f"{part} is stored as {_words(stored)}, but vLLM reads it{as_part} as "
                f"{_words(scheme)}",
            )


def _alike(first: QuantizationScheme, second: QuantizationScheme) -> bool:
    return all(
        getattr(first, name) == getattr(second, name)
        for name in ("weights", "input_activations", "output_activations")
    )


def _words(scheme: QuantizationScheme) -> str:
    weights, inputs = scheme.weights, scheme.input_activations
    named = "unquantized weights" if weights is None else describe_args(weights)
    return named if inputs is None else f"{named} with {describe_args(inputs)} inputs"


# -- fields of the config --------------------------------------------------------------------------


def _settings(written: WrittenCheckpoint) -> Iterator[Finding]:
    raw = written.config["quantization_config"]
    config = written.quantization
    if config.kv_cache_scheme is not None:
        try:
            check_cache(config.kv_cache_scheme)
        except Unservable as error:
            yield Finding("kernel", str(error))
    for name, group in (raw.get("config_groups") or {}).items():
        if not isinstance(group, Mapping):
            yield Finding("config", f"config_groups.{name} is a list; vLLM reads only objects")
    for name, scheme in config.config_groups.items():
        if scheme.weights is not None and scheme.weights.actorder in ("group", "dynamic"):
            yield Finding(
                "kernel",
                f"config_groups.{name} has actorder {str(scheme.weights.actorder.value)!r}, which "
                "vLLM no longer reads; versions up to August 2026 do",
                WARNING,
            )
    status = str(raw.get("quantization_status"))
    if written.schemes and status != "compressed":
        yield Finding(
            "status",
            f"quantization_status is {status!r}, so transformers does not decode the weights; "
            "expected 'compressed'",
        )
    if (raw.get("sparsity_config") or {}).get("targets"):
        yield Finding("config", "sparsity_config has targets, which vLLM refuses")
    yield from _version(raw.get("version"))


def _version(version: object) -> Iterator[Finding]:
    import compressed_tensors

    known = compressed_tensors.__version__
    if not isinstance(version, str):
        return  # optional
    numbers = version.split(".")[:2]
    if not all(part.isdigit() for part in numbers):
        yield Finding("status", f"version is {version!r}, which is no version", WARNING)
    elif [int(part) for part in numbers] > [int(part) for part in known.split(".")[:2]]:
        yield Finding(
            "status",
            f"version is {version}: a newer compressed-tensors than {known} wrote it; checks may "
            "miss what it added",
            WARNING,
        )
