"""What tests of all folders share; and a warning is an error in the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    os.environ["PYTHONWARNINGS"] = ",".join(config.getini("filterwarnings"))


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, which tests leave as it is."""
    from families import small_model

    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama").save_pretrained(folder)
    return folder
