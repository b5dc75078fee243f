"""The same examples on every run, and the NumPy oracle that lies beside the kernels' tests."""

import sys
from pathlib import Path

import hypothesis

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

hypothesis.settings.register_profile(
    "steelyard", derandomize=True, deadline=None, database=None, print_blob=False
)
hypothesis.settings.load_profile("steelyard")
