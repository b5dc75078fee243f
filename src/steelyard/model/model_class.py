"""The transformers class of a checkpoint: its modules, tensor names, tied weights and output head.

The class is built on the meta device, which costs next to nothing. transformers itself maps the
tensors of the files to those of the class. Code that ships with a checkpoint never runs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Linear, Module, MultiheadAttention

from steelyard.foreign import reason_of, show
from steelyard.model.meta_parameters import parameters_on_meta

__all__ = ["MOST_PARAMETERS", "ModelClass", "NoModelClass", "build", "named_class", "tied_modules"]

_MOST_LAYERS = 4096  # beyond this the class is not built: a config may state any number
MOST_PARAMETERS = 100_000
"""Tensors that a class may have: building more takes minutes."""


class NoModelClass(Exception):
    """transformers has no class for the config, or cannot build it; the message says why."""


class ModelClass:
    """A transformers model without weights, and the map from a checkpoint's tensors to its own.

    model:     on the meta device
    tensors:   name -> meta tensor, for the whole state dict
    places:    tensor of the files -> tensor of the class, where they are identical
    converted: the same, where the class concatenates or splits tensors, such as experts
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self.model = model
        self.modules: dict[str, Module] = dict(model.named_modules(remove_duplicate=False))
        self.tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        self.places, self.converted = self.find_places(names)

    @classmethod
    def of(cls, config: Mapping[str, Any], names: Iterable[str]) -> ModelClass:
        """Build the class that `config` names; raise `NoModelClass` if there is none."""
        return cls(build(config), names)

    def find_places(
        self, names: Iterable[str], quantizer: Any = None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return `places` and `converted` for the tensors of the files.

        quantizer: transformers' own, if the files are quantized
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self.model, hf_quantizer=quantizer)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix = self.model.base_model_prefix
        known: dict[str, Any] = dict.fromkeys(self.tensors, True)
        if quantizer is not None:  # a module's scales are where its weight is
            owners = {name.rpartition(".")[0] for name in self.tensors}
            known = _WithLeaves(known, owners)
        plain: dict[str, str] = {}
        converted: dict[str, str] = {}
        for name in sorted(names, key=dot_natural_key):
            place, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if place not in known and name in known:
                place, pattern = rename_source_key(name, [], [], prefix, known)
            if place in known:
                (plain if pattern is None else converted)[name] = place
        return plain, converted

    def module_name(self, name: str) -> str | None:
        """Return the class's name of a module of the files; None if it converts the weight."""
        place = self.places.get(f"{name}.weight")
        return place.removesuffix(".weight") if place and place.endswith(".weight") else None

    def file_names(self) -> dict[str, str]:
        """Return tensor of the class -> its name in the files, without converted ones."""
        return {place: name for name, place in self.places.items()}

    @property
    def head(self) -> str | None:
        """The output head's name in the class."""
        try:
            head = self.model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return None
        return next((n for n, m in self.modules.items() if head is not None and m is head), None)

    def is_called(self, name: str) -> bool:
        """Whether a Linear runs as a module; torch's own attention reads its weight instead."""
        parent = self.modules.get(name.rpartition(".")[0])
        return not isinstance(parent, MultiheadAttention)

    def is_linear(self, name: str) -> bool:
        return isinstance(self.modules.get(name), Linear) and self.is_called(name)

    def missing(self) -> list[str]:
        """Return the parameters of the class that no tensor fills, directly or by tying.

        Excludes those that the class allows to be missing.
        """
        return self.unfilled(self.tensors, self.places, self.converted)

    def unfilled(
        self, expected: Iterable[str], places: Mapping[str, str], converted: Mapping[str, str]
    ) -> list[str]:
        """Return the names in `expected` that nothing fills; see `find_places` for the others."""
        filled = {*places.values(), *self._converted_to(converted)}
        for names in tied_groups(self.model):
            if filled.intersection(names):
                filled.update(names)
        allowed = [re.compile(p) for p in self.model._keys_to_ignore_on_load_missing or ()]
        buffers = {name for name, _ in self.model.named_buffers()}
        absent = [name for name in expected if name not in filled and name not in buffers]
        return [name for name in absent if not any(p.search(name) for p in allowed)]

    def _converted_to(self, converted: Mapping[str, str]) -> set[str]:
        """Return the tensors of the class that converted ones fill.

        transformers names only the first tensor of a split, and the others depend on values, so all
        parameters of the same module count.
        """
        owners = {place.rpartition(".")[0] for place in converted.values()}
        nearest = {owner.rpartition(".")[0] for owner in owners}
        return {
            name
            for name in self.tensors
            if (owner := name.rpartition(".")[0]) in owners or owner.rpartition(".")[0] in nearest
        }


class _WithLeaves(dict[str, Any]):
    """The tensors of a class, and any other name within their modules."""

    def __init__(self, known: Mapping[str, Any], owners: set[str]) -> None:
        super().__init__(known)
        self.owners = owners

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).rpartition(".")[0] in self.owners

    def get(self, name: str, default: Any = None) -> Any:
        return True if name in self else default


def build(config: Mapping[str, Any]) -> Any:
    """Return the transformers model that a config describes, on the meta device."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise NoModelClass(
            f"transformers {transformers.__version__} has no model_type {show(kind)}"
        )
    if (layers := stated_layers(config)) > _MOST_LAYERS:
        raise NoModelClass(f"config.json states {layers:,} layers")
    try:
        plain = _floats({k: v for k, v in config.items() if k != "quantization_config"})
        with (
            torch.device("meta"),
            parameters_on_meta(MOST_PARAMETERS),
            warnings.catch_warnings(),
            _quiet(transformers),
        ):
            warnings.simplefilter("ignore")
            made = CONFIG_MAPPING[kind].from_dict(plain)
            return _class_for(transformers, made, config)(made).eval()
    except NoModelClass:
        raise
    except Exception as error:  # a class may raise anything for an unsuitable config
        raise NoModelClass(
            f"transformers {transformers.__version__} cannot build a {kind} from config.json "
            f"({reason_of(error)})"
        ) from None


def _floats(value: Any) -> Any:
    """Return settings with infinities and NaN, which transformers writes as objects, as floats."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _floats(each) for key, each in value.items()}
    return [_floats(each) for each in value] if isinstance(value, list) else value


def named_class(config: Mapping[str, Any]) -> Any:
    """Return the class of transformers that config.json names; None if it names none."""
    import transformers

    named = config.get("architectures")
    for name in named if isinstance(named, list) else []:
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return None


def _class_for(transformers: Any, made: Any, config: Mapping[str, Any]) -> Any:
    """Return the class that the config names, else the causal language model, else the base."""
    named = config.get("architectures")
    if (found := named_class(config)) is not None:
        return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        try:
            found = auto._model_mapping[type(made)]
        except KeyError:
            continue
        return found[0] if isinstance(found, tuple) else found
    raise NoModelClass(f"transformers {transformers.__version__} has no class for {show(named)}")


class _quiet:
    """Silences transformers' log messages about a config while the model is built."""

    def __init__(self, transformers: Any) -> None:
        self.logging = transformers.logging

    def __enter__(self) -> None:
        self.before = self.logging.get_verbosity()
        self.logging.set_verbosity_error()

    def __exit__(self, *exc: object) -> None:
        self.logging.set_verbosity(self.before)


def stated_layers(config: Mapping[str, Any]) -> int:
    """Return the largest number of layers that a config states for the model or a submodel."""
    parts = _parts(config)
    keys = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth")
    counts = [part.get(key) for part in parts for key in (*keys, "decoder_layers")]
    return max((c for c in counts if isinstance(c, int) and not isinstance(c, bool)), default=0)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = [_parts(part) for part in config.values() if isinstance(part, dict)]
    return [config, *(part for parts in inner for part in parts)]


def tied_groups(model: Any) -> list[set[str]]:
    """Return the groups of tied tensors, by name."""
    groups: list[set[str]] = []
    for pair in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        joined = set(pair)
        for group in [g for g in groups if g & joined]:
            joined |= group
            groups.remove(group)
        groups.append(joined)
    return groups


def tied_modules(model: Any) -> dict[str, str]:
    """Return module -> another module that shares its weight."""
    found: dict[str, str] = {}
    for group in tied_groups(model):
        owners = sorted(name.removesuffix(".weight") for name in group if name.endswith(".weight"))
        found.update((name, other) for name in owners for other in owners if other != name)
    return found
