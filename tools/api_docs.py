"""The page "API" of the site, from signatures and docstrings in the source.

The source is parsed, not imported, so building the site needs neither torch nor this package.

    python tools/api_docs.py     prints the page
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["names", "page"]

SOURCE = Path(__file__).resolve().parents[1] / "src"
MODIFIERS = "steelyard.modifiers"
CONTENTS = {
    "Running": {
        "steelyard.entry": ("oneshot", "Oneshot", "model_free_ptq"),
        "steelyard.engine.run_options": ("Options",),
        "steelyard.engine.result": ("Result",),
        "steelyard.algorithms.algorithm": ("ModuleResult",),
        "steelyard.engine.statistics": ("merge_statistics",),
        "steelyard.distributed.process_group": ("join_from_environment",),
    },
    "Evaluating": {
        "steelyard.evaluate.divergence": ("evaluate",),
        "steelyard.evaluate.evaluation": ("Evaluation",),
    },
    "Modifiers": {MODIFIERS: ()},
    "Observers": {
        "steelyard.observers.base": ("Observer",),
        "steelyard.observers.linked": ("fuse_weight_observers",),
    },
    "Algorithms": {
        "steelyard.algorithms.algorithm": ("Algorithm",),
        "steelyard.algorithms.needs": ("Needs",),
        "steelyard.algorithms.block": ("Block",),
    },
}
"""Section -> module -> names; without names, the modifiers that the package registers."""

Definition = ast.ClassDef | ast.FunctionDef


def page() -> str:
    """Return the page as Markdown."""
    parts = ["# API", "Made from the docstrings; the other pages say how it is used."]
    for section, modules in CONTENTS.items():
        parts.append(f"## {section}")
        for module, wanted in modules.items():
            for home, node in _definitions(module, wanted):
                parts += [
                    f"### `{node.name}`",
                    f"`from {home} import {node.name}`",
                    *_described(node),
                ]
    return "\n\n".join(parts) + "\n"


def names() -> list[str]:
    """Return everything that the page describes."""
    found = (_definitions(m, w) for modules in CONTENTS.values() for m, w in modules.items())
    return [node.name for definitions in found for _, node in definitions]


def _definitions(module: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, Definition]]:
    """Yield the module to import from, and the definition."""
    if module == MODIFIERS:
        for path in sorted((SOURCE / module.replace(".", "/")).glob("*.py")):
            for node in _top(path):
                if isinstance(node, ast.ClassDef) and _is_registered(node):
                    yield MODIFIERS, node
        return
    found = {node.name: node for node in _top(SOURCE / f"{module.replace('.', '/')}.py")}
    for name in wanted:
        yield _home(module, name), found[name]


def _home(module: str, name: str) -> str:
    """Return the package that exports a name, which is where users import it from."""
    package = module
    while package:
        package = package.rpartition(".")[0]
        init = SOURCE / package.replace(".", "/") / "__init__.py"
        if package and init.is_file() and f'"{name}"' in init.read_text(encoding="utf-8"):
            return package
    return module


def _top(path: Path) -> list[Definition]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]


def _is_registered(node: ast.ClassDef) -> bool:
    return any("Modifier.register(" in ast.unparse(each) for each in node.decorator_list)


def _described(node: Definition) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield f"```text\n{_signature(node)}\n```"
    yield f"```text\n{ast.get_docstring(node) or ''}\n```"
    if isinstance(node, ast.FunctionDef):
        return
    if fields := list(_fields(node)):
        yield "\n".join(["| field | default | |", "|---|---|---|", *fields])
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            text = ast.get_docstring(method)
            if text:
                yield f"```text\n{_signature(method)}\n\n{text}\n```"


def _signature(node: ast.FunctionDef) -> str:
    every = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{node.name}({every}){returns}"
    if len(line) <= 100:
        return line
    parts = _split(every)
    return f"{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _split(arguments: str) -> list[str]:
    """Split arguments at the commas outside of brackets.

    >>> _split("a, b: dict[str, int] = {}, *, c")
    ['a', 'b: dict[str, int] = {}', '*', 'c']
    """
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(arguments):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(arguments[start:place].strip())
            start = place + 1
    return [*parts, arguments[start:].strip()]


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a row for each field with a description: of pydantic, or as a string below it."""
    for place, item in enumerate(node.body):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        after = node.body[place + 1] if place + 1 < len(node.body) else None
        default, text = _field(item.value)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        if text and not item.target.id.startswith("_"):
            cells = (
                f"`{item.target.id}`",
                f"`{default}`" if default else "",
                " ".join(text.split()),
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _field(value: ast.expr | None) -> tuple[str, str]:
    """Return the default and the description of a field."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "Field"):
        return ("" if value is None else ast.unparse(value)), ""
    options = {each.arg: each.value for each in value.keywords}
    described = options.get("description")
    text = described.value if isinstance(described, ast.Constant) else ""
    default = options.get("default", options.get("default_factory"))
    return ("" if default is None else ast.unparse(default).removeprefix("lambda: ")), str(text)


if __name__ == "__main__":
    print(page())
