"""What the written recipe states of a choice that was made before the run.

Comments say what was chosen, with a digest of everything that the choice depends on. A run that
resumes takes the choice from there instead of making it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from steelyard.checkpoint.provenance import sampled_digest
from steelyard.checkpoint.work_folder import WorkFolder
from steelyard.data.samples import Samples
from steelyard.engine.identity import digest_of, versions
from steelyard.engine.run_options import Options
from steelyard.errors import CheckpointError
from steelyard.model.source import Source
from steelyard.recipes import Recipe, load_recipe

__all__ = ["choice_digest", "earlier_choice", "recipe_of_choice", "with_comments"]

_INPUTS = "chosen from inputs with SHA-256 "


def choice_digest(recipe: str, source: Source, samples: Samples | None) -> str | None:
    """Return a digest of the inputs of a choice; None for a loaded module, which cannot resume."""
    if source.shards is None:
        return None
    content = {
        "versions": versions(),
        "recipe": recipe,
        "config": source.config(),
        "files": {file.name: sampled_digest(file) for file in source.shards.files},
        "calibration data": digest_of(() if samples is None else samples.batches),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def earlier_choice(options: Options, digest: str | None) -> str | None:
    """Return the recipe of an unfinished run for the same output, if its inputs were the same."""
    if digest is None or options.output_dir is None or not options.resume:
        return None
    with contextlib.suppress(CheckpointError):  # the run reports it
        journal = WorkFolder(Path(options.output_dir)).read()
        text = str((journal or {}).get("identity", {}).get("recipe", ""))
        return text if f"# {_INPUTS}{digest}\n" in text else None
    return None


def with_comments(
    text: str, lines: Sequence[str], digest: str | None, before: Recipe | None = None
) -> str:
    """Return a recipe in YAML below comments that state a choice.

    before: a recipe whose choices are stated first, if it has any
    """
    comments = []
    if before is not None and before.chosen:
        kept = before.text.split("\n")
        comments = [line[2:] for line in kept if line.startswith("# ")]
    comments += [*lines, *([f"{_INPUTS}{digest}"] if digest else [])]
    return "".join(f"# {line}\n" for line in comments) + text


def recipe_of_choice(text: str) -> Recipe:
    """Return the recipe that `with_comments` wrote, with the lines that state the choice."""
    said = [line[2:] for line in text.split("\n") if line.startswith("# ")]
    lines = (line for line in said if not line.startswith(_INPUTS))
    return Recipe(load_recipe(text).modifiers, text, tuple(lines))
