"""A new algorithm is two files, its own and its options: recipes, plan, run and report find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ALGORITHM = '''
"""Scales the gains of norms."""

from __future__ import annotations

from typing import Any

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.block import Block


@Algorithm.register("rescaling")
class Rescaling(Algorithm):
    """Multiplies the weight of each target by a factor."""

    def transform(self, block: Block, state: Any) -> None:
        for name in block.modules:
            weight = f"{name}.weight"
            block.change(weight, block.tensor(weight) * self.modifier.factor)
'''

MODIFIER = '''
"""Options of the rescaling algorithm."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from steelyard.modifiers.modifier import Modifier


@Modifier.register("RescaleModifier")
class RescaleModifier(Modifier):
    """Scale the gains of norms."""

    algorithm: ClassVar[str] = "rescaling"

    factor: float = Field(default=2.0, gt=0, description="to multiply with")
'''

CHECKS = """
import sys
from pathlib import Path

sys.meta_path[:] = [f for f in sys.meta_path if "skbc" not in type(f).__module__]
root = Path(sys.argv[1])
sys.path[:0] = [str(root / "src")]
import steelyard

assert Path(steelyard.__file__).is_relative_to(root)
import torch
from safetensors.torch import load_file
from steelyard import oneshot
from steelyard.demo import model_folder
from steelyard.errors import RecipeError
from steelyard.modifiers import RescaleModifier
from steelyard.recipes import load_recipe
from steelyard.recipes.recipe_forms import modifier_names

assert "RescaleModifier" in modifier_names()
recipe = "RescaleModifier: {factor: 0.5, targets: ['re:.*input_layernorm$']}\\n"
recipe += "QuantizationModifier: {scheme: FP8_DYNAMIC, ignore: [lm_head]}"
assert load_recipe(recipe).modifiers[0] == RescaleModifier(
    factor=0.5, targets=["re:.*input_layernorm$"]
)
try:
    load_recipe(recipe.replace("factor", "facter"))
except RecipeError as error:
    assert "did you mean 'factor'" in str(error), error
else:
    raise AssertionError("an unknown option was accepted")
plan = oneshot(model_folder(), recipe, dry_run=True).plan
assert not plan.errors, plan.errors
result = oneshot(model_folder(), recipe, output_dir=root / "out")
name = "model.layers.0.input_layernorm.weight"
before = load_file(model_folder() / "model.safetensors")[name]
after = load_file(root / "out" / "model.safetensors")[name]
assert torch.equal(after, before * 0.5)
assert name in result.changed
assert name in (root / "out" / "report.json").read_text()
"""


def test_a_new_algorithm_touches_no_other_file(tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", "native")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=skipped)
    package = tmp_path / "src" / "steelyard"
    (package / "algorithms" / "rescaling.py").write_text(ALGORITHM, encoding="utf-8")
    (package / "modifiers" / "rescaling.py").write_text(MODIFIER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "STEELYARD_BACKEND": "reference"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
