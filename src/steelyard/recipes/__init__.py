"""Recipes: turns YAML or Python objects into the list of modifiers that a run applies."""

from steelyard.recipes.load import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe"]
