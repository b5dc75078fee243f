"""The same examples on every run."""

import hypothesis

hypothesis.settings.register_profile(
    "steelyard", derandomize=True, deadline=None, database=None, print_blob=False
)
hypothesis.settings.load_profile("steelyard")
