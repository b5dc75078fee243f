"""Checks whether transformers can load a quantized checkpoint, before and after it is written.

The model class is built on the meta device from the written config. Every tensor of the files needs
a parameter of the class, every parameter needs a tensor unless it is tied, and the class must
initialize without the packed weights. Only names, types and shapes are read.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from torch.nn import Embedding, Linear

from steelyard.errors import StrategyError
from steelyard.foreign import reason_of
from steelyard.formats import expected_tensors, stored_as
from steelyard.formats.tensor_names import SCALE, WEIGHT, base_of, is_parameter
from steelyard.model.meta_parameters import parameters_on_meta
from steelyard.model.model_class import (
    MOST_PARAMETERS,
    ModelClass,
    NoModelClass,
    build,
    tied_modules,
)

__all__ = ["ONLY_TRANSFORMERS", "loading_problems", "tied_problems"]

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors of a checkpoint: type and shape by name."""

ONLY_TRANSFORMERS = frozenset({"mt5", "rwkv", "t5", "umt5", "xlnet"})
"""Model types that vLLM's registry of January 2026 lacks and does not run through transformers.

If transformers cannot load one of these, nothing can.
"""

_LOADS = "With FP8_DYNAMIC it loads"


def loading_problems(config: Mapping[str, Any], tensors: Specs) -> list[str]:
    """Return the reasons why transformers cannot load a checkpoint, one sentence each.

    config: content of config.json, with its quantization_config

    Empty for a model that transformers does not know: there is no class to compare with.
    """
    tensors = dict(sorted(tensors.items()))  # the same sentences for any order of files
    try:
        model = build(config)
    except NoModelClass:
        return []
    import transformers
    from transformers.quantizers.auto import AutoHfQuantizer

    content = config["quantization_config"]
    quantizer = AutoHfQuantizer.from_config(dict(content), pre_quantized=True)
    quantizer.validate_environment(device_map=None)
    try:
        with parameters_on_meta(MOST_PARAMETERS):  # Llama 4's experts become Linear layers
            quantizer._convert_model_for_quantization(model)
        known = ModelClass(model, {_plain(name) for name in tensors})
        places = known.find_places(tensors, quantizer)
    except Exception as error:  # conversions that do not support quantized weights
        problems = [
            f"cannot load quantized weights of a {type(model).__name__} ({reason_of(error)}); "
            "vLLM loads models with its own classes, where it has one"
        ]
    else:
        schemes = _schemes(known, QuantizationConfig.model_validate(content))
        problems = [*_places(known, tensors, schemes, *places), *_initialization(known, schemes)]
    return [f"transformers {transformers.__version__} {problem}" for problem in problems]


def tied_problems(config: Mapping[str, Any], tensors: Specs) -> list[str]:
    """Return one sentence for each quantized module that shares its weight with another module.

    No server can read them: the other module would load integer codes, or nothing.
    """
    try:
        known = ModelClass.of(config, {_plain(name) for name in tensors})
    except NoModelClass:
        return []
    tied = tied_modules(known.model)
    owners = {name.rpartition(".")[0] for name in tensors if _plain(name) != name}
    shared = {owner: tied.get(known.module_name(owner) or "") for owner in sorted(owners)}
    return [
        f"{name} is quantized and shares its weight with {other}, which cannot read it; quantize "
        "the model again without that target"
        for name, other in shared.items()
        if other is not None
    ]


def _plain(name: str) -> str:
    """Return the name of a tensor's weight before quantization."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.{WEIGHT}" if is_parameter(leaf) else name


def _schemes(known: ModelClass, config: QuantizationConfig) -> dict[str, QuantizationScheme]:
    """Return the scheme that compressed-tensors assigns to each module of the class."""
    targets = {t: s for s in config.config_groups.values() for t in s.targets}
    found = {}
    for name, module in known.modules.items():
        if isinstance(module, (Linear, Embedding)) and not is_match(name, module, config.ignore):
            hits = match_targets(name, module, list(targets))
            if hits:
                found[name] = targets[hits[0]]
    return found


def _places(
    known: ModelClass,
    tensors: Specs,
    schemes: Mapping[str, QuantizationScheme],
    places: Mapping[str, str],
    converted: Mapping[str, str],
) -> Iterator[str]:
    """Yield tensors without a parameter in the class, and parameters without a tensor."""
    expected: dict[str, tuple[int, ...]] = {n: tuple(t.shape) for n, t in known.tensors.items()}
    for name, scheme in schemes.items():
        weight: Any = known.modules[name].weight
        try:
            needed = expected_tensors(scheme, weight.shape, weight.dtype)
        except StrategyError as error:
            yield (
                f"expects {tuple(weight.shape)} for {name}.weight ({error}); config.json and the "
                "files are not of one model"
            )
            return
        del expected[f"{name}.weight"]
        expected.update((f"{name}.{leaf}", shape) for leaf, (_, shape) in needed.items())
    gone = known.missing()
    joined = {name.removesuffix("weight") for name in known.converted}
    stray = [n for n in tensors if places.get(n, converted.get(n)) not in expected]
    experts = [n for n in stray if f"{n.rpartition('.')[0]}." in joined and _matters(n)]
    experts += sorted(n for n in converted if not _broadcasts(n, tensors))
    lists, stacks = {_list_of(n) for n in gone}, {n.rpartition(".")[0] for n in gone}
    cut = [n for n in stray if _list_of(n) in stacks]
    flat = _restacked_scales(known, converted)
    experts += cut + flat + [n for n in stray if n.rpartition(".")[0] in lists]
    if experts:
        never = {*cut, *flat, *converted.keys() & set(stray)}  # in whatever format
        remedy = "Ignored, they load" if never.issuperset(experts) else _LOADS
        kind = "experts" if "expert" in experts[0] else "layers that its class concatenates"
        yield (
            f"does not load {kind} as they are stored here, such as "
            f"{experts[0].rpartition('.')[0]}, and would load wrong values. vLLM's own "
            f"classes read them one by one. {remedy} in transformers too"
        )
    ours = {name for name in tensors if _plain(name) in known.places}
    others = [name for name in stray if name in ours]
    if others:
        yield f"has no parameter for {_some(others)}. {_LOADS}; or ignore the module"
    unfilled = [n for n in known.unfilled(expected, places, converted) if n not in set(gone)]
    if unfilled and not experts:
        yield (
            f"would initialize {_some(unfilled)} randomly, since no tensor fills it. {_LOADS}; "
            "or ignore it"
        )
    for name, place in sorted(places.items()):
        if place in expected and expected[place] != tuple(tensors[name][1]):
            yield (
                f"expects {expected[place]} for {place}, but {name} is {tuple(tensors[name][1])}; "
                "config.json and the files are not of one model"
            )


def _restacked_scales(known: ModelClass, converted: Mapping[str, str]) -> list[str]:
    """Return the scales of layers that the class concatenates but decodes to a stack."""
    scales = [name for name in converted if name.endswith(f".{SCALE}")]
    counts = Counter(converted[name] for name in scales)
    flat = {p for p in counts if p in known.tensors and known.tensors[p].ndim == 2}
    return [name for name in scales if converted[name] in flat and counts[converted[name]] > 1]


def _list_of(name: str) -> str | None:
    """Return the list that holds a tensor's module: `experts` for `experts.3.up_proj.weight`."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1]]) if numbers else None


def _broadcasts(name: str, tensors: Specs) -> bool:
    """Whether a scale broadcasts over its weight, as transformers expects of fp8 experts."""
    weight = tensors.get(name.removesuffix("_scale"))
    if not name.endswith(f".{SCALE}") or weight is None:
        return True
    pairs = zip(reversed(tensors[name][1]), reversed(weight[1]), strict=False)
    return all(size in (1, whole) for size, whole in pairs)


def _matters(name: str) -> bool:
    """Whether a tensor is needed to decode a weight, unlike static activation scales."""
    return base_of(name.rpartition(".")[2]) not in ("input", "output")


def _initialization(known: ModelClass, schemes: Mapping[str, QuantizationScheme]) -> Iterator[str]:
    """Yield a sentence if the class initializes the weight of a packed module at load time."""
    packed = [n for n, s in schemes.items() if s.weights is not None and stored_as(s).is_packed]
    parts = dict(known.model.named_modules())
    from transformers import PreTrainedModel

    owner: dict[str, Any] = {}  # the model that initializes a module's weights
    for name, module in parts.items():
        above = owner.get(name.rpartition(".")[0], known.model)
        owner[name] = module if isinstance(module, PreTrainedModel) else above
    tried: set[tuple[type, type, bool]] = set()
    with _without_weights(known, packed):
        for name, module in parts.items():
            kind = (type(owner[name]), type(module), name in schemes)
            if kind in tried:
                continue
            tried.add(kind)
            try:
                with torch.no_grad():
                    owner[name]._init_weights(module)
            except AttributeError as error:
                if "weight" in str(error) and isinstance(module, Embedding):
                    yield (
                        f"cannot load the packed embedding {name} ({error}); vLLM reads a token "
                        "embedding of packed integers. In 8-bit floats it loads in transformers, "
                        "but not in vLLM"
                    )
                    return
                if "weight" in str(error):
                    yield (
                        f"cannot load packed weights of a {type(known.model).__name__}: it looks "
                        f"for a weight of {name} that is packed ({error}); {_vllm(known)}"
                    )
                    return
            except Exception:  # some initializers fail on the meta device only
                continue


def _vllm(known: ModelClass) -> str:
    if known.model.config.model_type in ONLY_TRANSFORMERS:
        return "vLLM does not list this model. With FP8_DYNAMIC or W8A8 it loads"
    return f"vLLM loads models with its own classes, where it has one. {_LOADS} in transformers too"


@contextlib.contextmanager
def _without_weights(known: ModelClass, names: Iterable[str]) -> Iterator[None]:
    kept = {name: known.modules[name]._parameters.pop("weight") for name in names}
    try:
        yield
    finally:
        for name, weight in kept.items():
            known.modules[name]._parameters["weight"] = weight


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
