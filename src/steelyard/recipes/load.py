"""Loads a recipe, in any of its forms, as a list of modifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import is_preset_scheme

from steelyard.algorithms import Algorithm, algorithm_of, needs_data
from steelyard.errors import RecipeError, nearest
from steelyard.modifiers import Modifier
from steelyard.modifiers.check import check_options
from steelyard.modifiers.locate import Problem, RecipeText
from steelyard.recipes.dump import dump_modifiers
from steelyard.recipes.recipe_forms import RecipeEntry, entries_of, is_stage, wrong_object
from steelyard.recipes.yaml_text import read_yaml

__all__ = ["Recipe", "load_recipe"]

MAX_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Recipe:
    """The modifiers to apply to a model.

    text:   YAML that loads to equal modifiers; the user's own if the recipe came as YAML
    chosen: what was chosen before the run, such as schemes by a bit budget, in a few lines
    """

    modifiers: list[Modifier]
    text: str = ""
    chosen: tuple[str, ...] = ()

    @classmethod
    def from_modifiers(cls, modifiers: Any, modifier_group_name: str | None = None) -> Recipe:
        """Return the recipe of a modifier or several; the name of their group has no effect."""
        return load_recipe(modifiers)

    @classmethod
    def create_instance(
        cls,
        path_or_modifiers: Any,
        modifier_group_name: str | None = None,
        target_stage: str | None = None,
    ) -> Recipe:
        """Return `load_recipe(path_or_modifiers, target_stage)`."""
        return load_recipe(path_or_modifiers, target_stage)

    def yaml(self, file_path: str | Path | None = None) -> str:
        """Return the recipe as YAML, and write it to a file if one is named."""
        text = self.text or (dump_modifiers(self.modifiers) if self.modifiers else "")
        if file_path is not None:
            Path(file_path).write_text(text, encoding="utf-8")
        return text

    def algorithms(self) -> list[Algorithm]:
        """Return a new instance of each modifier's algorithm, in the order of the recipe."""
        return [algorithm_of(each) for each in self.modifiers if not each.chooses_schemes]

    @property
    def needs_data(self) -> bool:
        """Whether any modifier needs calibration data."""
        return needs_data(self.algorithms())


def load_recipe(recipe: Any, stage: str | None = None) -> Recipe:
    """Read a recipe, or raise a RecipeError that lists every problem in it.

    recipe: a path to a .yaml, .yml or .json file, YAML text, a modifier, a list of any of these, a
            Recipe, or the content of such a file as dicts and lists; None for no modifiers
    stage:  load only the stages whose names start with it

    >>> load_recipe("modifiers: {QuantizationModifier: {scheme: W4A16}}").modifiers
    [QuantizationModifier(targets=['Linear'], ignore=[], scheme='W4A16', ...)]
    """
    if recipe is None:
        return Recipe([], "")
    if isinstance(recipe, Path) or (isinstance(recipe, str) and _is_path(recipe)):
        text = _read(Path(recipe))
        return _from_text(_parse(text, str(recipe)), text, stage)
    if isinstance(recipe, str):
        return _from_text(_parse(recipe, "recipe"), recipe, stage)
    if isinstance(recipe, (list, tuple)) and any(_is_recipe(item) for item in recipe):
        loaded = [load_recipe(item, stage) for item in recipe]
        modifiers = [modifier for each in loaded for modifier in each.modifiers]
        return Recipe(modifiers, dump_modifiers(modifiers))
    if isinstance(recipe, Mapping):
        modifiers = _modifiers(_staged(RecipeText(recipe), stage))
        return Recipe(modifiers, dump_modifiers(modifiers))
    if stage is not None:
        raise RecipeError(f"stage={stage!r} needs a recipe in YAML with stages; remove the option")
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Modifier):
        return Recipe(recipe.steps(), dump_modifiers([recipe]))
    if not isinstance(recipe, (list, tuple)):
        raise RecipeError(_not_a_recipe(recipe))
    modifiers = _modifiers(RecipeText(recipe))
    return Recipe(modifiers, dump_modifiers(modifiers))


def _is_recipe(item: Any) -> bool:
    """Whether an item of a list is a recipe of its own: a file, text, or several modifiers."""
    return isinstance(item, (Path, Recipe, list, tuple)) or (
        isinstance(item, str) and (_is_path(item) or "\n" in item or ":" in item)
    )


def _from_text(source: RecipeText, text: str, stage: str | None) -> Recipe:
    modifiers = _modifiers(_staged(source, stage))
    return Recipe(modifiers, text if stage is None else dump_modifiers(modifiers))


def _staged(source: RecipeText, stage: str | None) -> RecipeText:
    """Return the stages whose names start with `stage`."""
    if stage is None:
        return source
    stages = source.value if isinstance(source.value, Mapping) else {}
    names = [key for key in stages if isinstance(key, str) and is_stage(key)]
    chosen = {key: stages[key] for key in names if key.startswith(stage)}
    if not chosen:
        raise RecipeError(f"the recipe has no stage {stage!r}: {nearest(stage, names)}")
    return replace(source, value=chosen)


def _modifiers(source: RecipeText) -> list[Modifier]:
    modifiers: list[Modifier] = []
    problems: list[Problem] = []
    for entry in entries_of(source.value):
        if not isinstance(entry, RecipeEntry):
            problems.append(entry)
        elif isinstance(entry.modifier, Modifier):
            modifiers.extend(entry.modifier.steps())
        else:
            checked = check_options(entry.modifier, entry.options, entry.path)
            if isinstance(checked, Modifier):
                modifiers.extend(checked.steps())
            else:
                problems.extend(checked)
    if problems:
        raise source.refuse(problems)
    return modifiers


# -- reading text -----------------------------------------------------------------------------


def _is_path(text: str) -> bool:
    return "\n" not in text and text.lower().endswith((".yaml", ".yml", ".json"))


def _read(path: Path) -> str:
    try:
        content = _content(path)
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe file {path}") from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder: pass the recipe file in it") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError:  # a NUL in it
        raise RecipeError(f"{str(path)!r} is not the name of a file") from None
    if len(content) > MAX_BYTES:
        raise RecipeError(f"{path} has more than {MAX_BYTES} bytes: too large for a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not text: byte {error.start} is not UTF-8") from None


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _parse(text: str, name: str) -> RecipeText:
    source = read_yaml(text, name)
    if isinstance(source.value, (Mapping, list)):
        return source
    raise RecipeError(f"{name}: {_not_a_recipe(source.value)}")


def _not_a_recipe(value: Any) -> str:
    if isinstance(value, str) and is_preset_scheme(value):
        return f'{value!r} is a scheme, not a recipe: pass QuantizationModifier(scheme="{value}")'
    forms = "a recipe is a .yaml file, YAML text, a modifier or a list of modifiers"
    if isinstance(value, (str, int, float)):
        shown = repr(value)
        return f"{forms}, got {shown if len(shown) <= 60 else f'{shown[:57]}...'}"
    return f"{forms}, got nothing" if value is None else f"{forms}: {wrong_object(value)}"
