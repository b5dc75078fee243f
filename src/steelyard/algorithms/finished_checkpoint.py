"""A written checkpoint, as the last phase of a run sees it: complete, but not in place yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from steelyard.data.samples import Samples
from steelyard.distributed import ThreadPool

__all__ = ["FinishedCheckpoint"]


@dataclass(frozen=True)
class FinishedCheckpoint:
    """The quantized checkpoint and the means to improve it.

    base:     folder of the original model
    folder:   folder of the quantized model; only the engine writes there
    samples:  calibration samples
    notes:    lines for the report
    progress: `with progress(label, total, unit="work") as advance`, as `engine.progress`
    """

    base: Path
    folder: Path
    samples: Samples
    pool: ThreadPool
    notes: list[str]
    progress: Callable[..., AbstractContextManager[Callable[..., None]]]
    trust_remote_code: bool = False
