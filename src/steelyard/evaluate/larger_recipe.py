"""The recipe that gives the blocks that cost most the next larger scheme."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from steelyard.errors import RecipeError
from steelyard.evaluate.diagnosis import BlockCost, Diagnosis
from steelyard.evaluate.larger_scheme import larger_scheme
from steelyard.formats.descriptions import scheme_label
from steelyard.model.source import Source
from steelyard.modifiers import QuantizationModifier
from steelyard.modifiers.modifier import Modifier
from steelyard.recipes import load_recipe
from steelyard.recipes.dump import dump_modifiers
from steelyard.recipes.mixed import with_schemes

__all__ = ["costliest", "larger_recipe"]

BLOCKS = 3


def costliest(blocks: Sequence[BlockCost]) -> list[BlockCost]:
    """Return the blocks that would gain most, of those whose gain is more than noise."""
    sure = [b for b in blocks if b.gain is not None and b.gain > 2 * (b.gain_error or 0.0)]
    return sorted(sure, key=lambda block: -(block.gain or 0.0))[:BLOCKS]


def larger_recipe(quantized: Source, diagnosis: Diagnosis) -> str | None:
    """Return a recipe as YAML; None if no block would gain."""
    blocks = costliest(diagnosis.blocks)
    while blocks and not _keeps_some(quantized, blocks):
        blocks = blocks[:-1]
    if not blocks:
        return None
    members: dict[str, list[str]] = {}
    groups: dict[str, QuantizationScheme] = {}
    ignore: list[str] = []
    for name, module in quantized.model.named_modules():
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None or not _inside(name, blocks):
            continue
        larger = larger_scheme(scheme)
        if larger is None:
            ignore.append(name)
            continue
        group = f"larger_{scheme_label(larger).replace('-', '_').lower()}"
        groups.setdefault(group, larger)
        members.setdefault(group, []).append(name)
    modifiers = _modifiers(quantized)
    return dump_modifiers(with_schemes(modifiers, members, groups, ignore))


def _inside(name: str, blocks: Sequence[BlockCost]) -> bool:
    return any(name.startswith(f"{block.name}.") for block in blocks)


def _keeps_some(quantized: Source, blocks: Sequence[BlockCost]) -> bool:
    """Whether any module would still be quantized."""
    for name, module in quantized.model.named_modules():
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is not None and not (_inside(name, blocks) and larger_scheme(scheme) is None):
            return True
    return False


def _modifiers(quantized: Source) -> list[Modifier]:
    """Return the recipe of a checkpoint; of another tool's, one with the same schemes."""
    assert quantized.shards is not None
    path = Path(quantized.shards.folder) / "recipe.yaml"
    if path.is_file():
        try:
            found = load_recipe(path).modifiers
        except RecipeError:
            found = []  # of another tool
        quantizing = [m for m in found if isinstance(m, QuantizationModifier)]
        if len(quantizing) == 1:
            return found
    config: QuantizationConfig = quantized.shards.quantization  # type: ignore[attr-defined]
    groups = {
        name: scheme.model_copy(update={"format": None})
        for name, scheme in config.config_groups.items()
    }
    cache = config.kv_cache_scheme
    ignore = list(config.ignore or ())
    return [QuantizationModifier(config_groups=groups, ignore=ignore, kv_cache_scheme=cache)]
