"""Importing: cheap at the top, and downwards only inside the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steelyard

SOURCE = Path(__file__).parents[1] / "src" / "steelyard"
FILES = sorted(SOURCE.rglob("*.py"))

# A package may import from the layers below its own. Packages of one layer may import each other,
# but never both ways.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("entry", "script_tools"),
    ("report", "evaluate", "doctor"),
    ("engine",),
    ("plan", "algorithms", "recipes"),
    ("modifiers", "model", "data"),
    ("checkpoint",),
    ("observers", "formats"),
    ("distributed",),
    ("kernels", "demo"),
    (
        "fusion",
        "names",
        "errors",
        "registry",
        "atomic_file",
        "words",
        "aliases",
        "plugins",
        "sessions",
        "logs",
    ),
    ("file_lock",),
    ("foreign", "collector"),
)
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}


def imported_modules(source: str, package: str) -> set[str]:
    """Return the full dotted name of everything that `source` imports from steelyard.

    `package` is the package that the source belongs to; relative imports start from it. Imports
    inside functions and under TYPE_CHECKING count like any other.

    >>> sorted(imported_modules("from .. import errors", "steelyard.kernels"))
    ['steelyard.errors']
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return {name for name in names if name.split(".")[0] == "steelyard"}


def imported_packages(source: str, package: str) -> set[str]:
    """Return the top-level packages that `source` imports, its own among them.

    A name taken from `steelyard` itself (`from steelyard import Observer`) is returned as it is:
    it belongs to no layer, and so it fails the test of the direction.
    """
    names = imported_modules(source, package) - {"steelyard.__version__"}
    return {name.split(".")[1] if "." in name else name for name in names}


def upward_imports(source: str, package: str, owner: str) -> list[str]:
    """Return one sentence for each import in a file of `owner` that points the wrong way."""
    found = []
    for name in sorted(imported_packages(source, package)):
        if name not in DEPTH:
            found.append(f"{owner} imports {name}, which has no place in LAYERS")
        elif DEPTH[name] < DEPTH[owner]:
            found.append(f"{owner} imports {name}, which stands above it")
    return found


def package_of(path: Path) -> str:
    return ".".join(["steelyard", *path.relative_to(SOURCE).parent.parts])


def owner_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def layered_files() -> list[Path]:
    return [path for path in FILES if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", layered_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    owner = owner_of(path)
    assert owner in DEPTH, f"{owner} is new: give it a place in LAYERS"
    assert upward_imports(path.read_text("utf-8"), package_of(path), owner) == []


def test_packages_of_one_layer_import_each_other_one_way_only() -> None:
    edges = {
        (owner_of(path), name)
        for path in layered_files()
        for name in imported_packages(path.read_text("utf-8"), package_of(path))
    }
    both_ways = {(a, b) for a, b in edges if a < b and (b, a) in edges}
    assert both_ways == set()


def test_contributing_lists_the_layers() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| .+ \|$", text, re.MULTILINE)
    layers = [(i, name) for i, layer in enumerate(LAYERS, start=1) for name in layer]
    assert sorted((int(layer), name) for layer, name in rows) == sorted(layers)


@pytest.mark.parametrize(
    "source",
    [
        "import steelyard.observers",
        "import steelyard.observers.base as base",
        "from steelyard.observers import Observer",
        "from steelyard import observers",
        "from steelyard import Observer",
        "import steelyard",
        "from ..observers.base import Observer",
        "from .. import observers",
        "def late():\n    from steelyard.observers import Observer",
        "if TYPE_CHECKING:\n    from steelyard.observers import Observer",
    ],
)
def test_checker_finds_an_import_from_above(source: str) -> None:
    assert len(upward_imports(source, "steelyard.kernels", "kernels")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import steelyardish",
        "from . import rounding",
        "from .rounding import round_to",
        "from steelyard import __version__",
        "from steelyard.kernels.range import min_max",
        "from steelyard.errors import SteelyardError",
        "from .. import errors",
        "from ..registry import Registry",
    ],
)
def test_checker_accepts_imports_from_beside_and_below(source: str) -> None:
    assert upward_imports(source, "steelyard.kernels", "kernels") == []


@pytest.mark.parametrize("module", ["steelyard", "steelyard.kernels", "steelyard.demo"])
def test_import_leaves_heavy_packages_alone(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "print(*sys.modules.keys() & {'torch', 'compressed_tensors', 'transformers'})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("name", steelyard.__all__)
def test_exported_name_resolves(name: str) -> None:
    assert name in dir(steelyard)
    assert getattr(steelyard, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Obsever'"):
        steelyard.Obsever  # noqa: B018
