"""What tests of all folders share; and a warning is an error in the processes that they start.

Every run has a temporary folder of its own. By default pytest numbers its folders in one that all
runs of a user share, and at its end removes the oldest. Where that fails, because the folder of a
killed run is too deep or a process still writes there, a warning ends the run that cleans up.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest

OWN_FOLDER = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)  # before pytest reads where temporary files go
def pytest_configure(config: pytest.Config) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported; only forced kernels use it
    os.environ["PYTHONWARNINGS"] = ",".join(config.getini("filterwarnings"))
    # One type for all processors, in started processes too: most oracles are fp32.
    os.environ["STEELYARD_FORWARD"] = "fp32"
    if config.option.basetemp is None:  # a worker of xdist has one below that of the run
        folder = tempfile.mkdtemp(prefix="steelyard-")
        config.option.basetemp = config.stash[OWN_FOLDER] = folder


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the folder when all is over, but not the files of a test that failed."""
    folder = session.config.stash.get(OWN_FOLDER, None)
    if folder is not None and exitstatus == pytest.ExitCode.OK:
        session.config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama, which tests leave as it is."""
    from families import small_model

    folder = tmp_path_factory.mktemp("model") / "m"
    small_model("llama").save_pretrained(folder)
    return folder
