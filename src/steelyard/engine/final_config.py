"""The quantization config of a written checkpoint.

vLLM matches targets against the names in the files, transformers against those of the class that it
loads. Modules that saw no token get a scheme without activations, and those that no static scale
serves one with dynamic activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from steelyard.words import count

__all__ = ["final_config"]


def final_config(
    config: QuantizationConfig,
    modules: Collection[str],
    own: Mapping[str, QuantizationScheme],
    stored_name: Callable[[str], str],
    class_name: Callable[[str], str],
    notes: list[str],
) -> QuantizationConfig:
    """Return the config to write; modules with a scheme of their own are targeted by name.

    config:       config of the plan
    modules:      names of the quantized modules
    own:          schemes of the modules that saw no token, or that no static scale serves
    stored_name:  maps a module to its name in the files
    class_name:   maps a module to its name in the class that will be loaded
    notes:        one line is added for each scheme of modules that saw no token
    """
    groups = {
        name: _by_both_names(scheme, modules, stored_name, class_name)
        for name, scheme in config.config_groups.items()
    }
    by_scheme: dict[str, list[str]] = {}
    for name, scheme in own.items():
        if scheme.weights is None:  # left as it is: it is written unquantized, and ignored
            continue
        by_scheme.setdefault(scheme.model_dump_json(exclude={"targets"}), []).append(name)
    extra = {}
    for i, names in enumerate(by_scheme.values()):
        targets = list(dict.fromkeys([*map(stored_name, names), *map(class_name, names)]))
        scheme = own[names[0]]
        kind = "weights_only" if scheme.input_activations is None else "dynamic"
        extra[f"{kind}_{i}"] = scheme.model_copy(update={"targets": targets})
        if kind == "dynamic":
            continue
        notes.append(
            f"{count(len(names), 'module')} saw no token; only their weights are quantized: "
            + ", ".join(names)
        )
    return config.model_copy(update={"config_groups": {**extra, **groups}})


def _by_both_names(
    scheme: QuantizationScheme,
    modules: Collection[str],
    stored_name: Callable[[str], str],
    class_name: Callable[[str], str],
) -> QuantizationScheme:
    """Return a scheme whose targets hold both names of each module: in the files, in the class."""
    targets: list[str] = []
    for target in scheme.targets:
        names = [stored_name(target), class_name(target)] if target in modules else []
        targets += [name for name in dict.fromkeys([target, *names]) if name not in targets]
    return scheme if targets == scheme.targets else scheme.model_copy(update={"targets": targets})
