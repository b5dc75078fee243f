"""A new observer is one file: everything that lists, checks or estimates observers finds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OBSERVER = '''
"""Three quarters of the range."""

from __future__ import annotations

import torch
from pydantic import Field

from steelyard.observers.base import Observer
from steelyard.observers.observer_options import ObserverOptions


class FractionOptions(ObserverOptions):
    """Options of the observer."""

    fraction: float = Field(default=0.75, gt=0, le=1, description="part of the range to keep")


@Observer.register("fraction")
class FractionObserver(Observer):
    """A fraction of the range of the last value."""

    Options = FractionOptions
    suits = "weights"
    seconds_per_weight = 5e-6

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        low, high = self.range_of(observed)
        self.min_vals, self.max_vals = low * self.options.fraction, high * self.options.fraction
'''

CHECKS = """
import contextlib, io, json, sys
from pathlib import Path

sys.meta_path[:] = [f for f in sys.meta_path if "skbc" not in type(f).__module__]
root = Path(sys.argv[1])
sys.path[:0] = [str(root / "src"), str(root / "tools")]
import steelyard
from steelyard import names

assert Path(steelyard.__file__).is_relative_to(root)
assert "fraction" in names.observer_names() and "torch" not in sys.modules

import torch
from steelyard.cli.app import run
from steelyard.errors import RecipeError
from steelyard.modifiers import QuantizationModifier
from steelyard.plan.plan import Planned, search_time
from steelyard.recipes import load_recipe

listed = io.StringIO()
with contextlib.redirect_stdout(listed), contextlib.suppress(SystemExit):
    run(["ls", "observers", "--json"])
summary = json.loads(listed.getvalue())["observers"]["fraction"]
assert summary == "A fraction of the range of the last value."

recipe = "QuantizationModifier: {scheme: W4A16, weight_observer: {name: fraction, fraction: 0.5}}"
(modifier,) = load_recipe(recipe).modifiers
scheme = modifier.config.config_groups["group_0"]
assert scheme.weights.observer_kwargs == {"fraction": 0.5}
try:
    load_recipe(recipe.replace("fraction: 0.5", "fractoin: 0.5"))
except RecipeError as error:
    assert "did you mean 'fraction'" in str(error), error
else:
    raise AssertionError("an unknown option was accepted")

planned = Planned("up_proj", (100, 1000), torch.bfloat16, scheme, "group_0")
assert abs(search_time(planned) - 0.5) < 1e-9

import observer_docs

page = observer_docs.complete(observer_docs.PAGE.read_text("utf-8"))
assert observer_docs.PAGE.is_relative_to(root)
assert "| [`fraction`](#fraction) | A fraction of the range of the last value | weights |" in page
assert "| `fraction` | 0.75 | part of the range to keep |" in page
"""


def test_a_new_observer_is_found_everywhere(tmp_path: Path) -> None:
    for folder in ("src", "docs", "tools"):
        skipped = shutil.ignore_patterns("__pycache__", "native", "*.safetensors")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    new = tmp_path / "src" / "steelyard" / "observers" / "fraction.py"
    new.write_text(OBSERVER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "STEELYARD_BACKEND": "reference"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
