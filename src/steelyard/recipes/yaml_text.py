"""Reads YAML as plain values, with the line number of each.

PyYAML's safe loader composes the node tree, and this module reads it: PyYAML's own constructor
loses line numbers, lets a later key overwrite an earlier one, and expands aliases without a limit.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from steelyard.errors import RecipeError
from steelyard.modifiers.locate import KeyPath, Problem, RecipeText

__all__ = ["add_numbers", "read_yaml"]

MAX_DEPTH = 50
MAX_REPEATS = 10_000  # values that aliases may repeat

TAG = "tag:yaml.org,2002:"
PLAIN = {f"{TAG}{name}" for name in ("null", "bool", "int", "float", "str")}


def add_numbers(language: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    """Read `1e-3` as a number, as in YAML 1.2; PyYAML reads it as text."""
    pattern = re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
    language.add_implicit_resolver(f"{TAG}float", pattern, list("-+0123456789"))


class _Loader(yaml.SafeLoader):
    """The safe loader, which reads dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
add_numbers(_Loader)


def read_yaml(text: str, name: str) -> RecipeText:
    """Read one YAML document; errors refer to it as `name`."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(f"{name}: the recipe is empty: add a modifier")
        reader = _Reader(loader, name)
        value = reader.read(node, ())
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{name}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise RecipeError(f"{name}: nested too deeply for a recipe") from None
    finally:
        if loader is not None:
            loader.dispose()
    source = RecipeText(value, name, reader.lines)
    if reader.problems:
        raise source.refuse(reader.problems)
    return source


class _Reader:
    """Walks a node tree once; collects line numbers and problems."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._loader = loader
        self._name = name
        self._seen: set[int] = set()
        self._open: set[int] = set()
        self._repeats = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = node.start_mark.line + 1
        if id(node) in self._open:
            return self._refuse(path, "an alias refers to a value that contains it")
        if len(path) > MAX_DEPTH:
            return self._refuse(path[:3], f"nested more than {MAX_DEPTH} levels deep")
        self._repeats += id(node) in self._seen
        if self._repeats > MAX_REPEATS:
            raise RecipeError(
                f"{self._name}:{node.start_mark.line + 1}: aliases repeat more than {MAX_REPEATS} "
                "values; write the values out"
            )
        self._seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == f"{TAG}map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == f"{TAG}seq":
                return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
            if isinstance(node, yaml.SequenceNode) and _is_choice(node):
                return self.read(node.value[0], path)
            return self._refuse(path, f"the tag {_short(node.tag)} is not allowed in a recipe")
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag not in PLAIN:
            return self._refuse(path, f"the tag {_short(node.tag)} is not allowed in a recipe")
        try:
            return self._loader.construct_object(node)
        except (ValueError, KeyError, IndexError):  # such as !!int before text
            return self._refuse(path, f"{node.value[:60]!r} is not a {node.tag[len(TAG) :]}")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        found: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{TAG}merge":
                merged.update(self._merged(value_node, path))
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.lines[path] = line
                self._refuse(path, "a key must be text")
                continue
            key = self._scalar(key_node, path)
            if key in found:
                self.lines.setdefault((*path, key), line)
                twice = f"the key is given twice, on lines {lines[key]} and {line}"
                self._refuse((*path, key), twice)
                continue
            found[key] = self.read(value_node, (*path, key))
            here = (*path, key)
            lines[key] = self.lines[here] = line
        return {**merged, **found}

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[Any, Any]:
        """Return the mapping that `<<:` merges in; of several, the first one wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[Any, Any] = {}
        for source in sources:
            value = self.read(source, path)
            if isinstance(value, dict):
                merged = {**value, **merged}
            else:
                self._refuse(path, "<< takes a mapping, or a list of them")
        return merged

    def _refuse(self, path: KeyPath, text: str) -> None:
        self.problems.append((path, text))


def _is_choice(node: yaml.SequenceNode) -> bool:
    """Whether a node is one of compressed-tensors' choices, as llm-compressor writes them.

    strategy: !!python/object/apply:compressed_tensors...QuantizationStrategy [tensor]

    Only the word is read; nothing is imported or called.
    """
    prefix = f"{TAG}python/object/apply:compressed_tensors.quantization."
    single = len(node.value) == 1 and isinstance(node.value[0], yaml.ScalarNode)
    return single and node.tag.startswith(prefix)


def _short(tag: str) -> str:
    return tag.replace(TAG, "!!")
