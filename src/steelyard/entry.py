"""`steelyard.oneshot`: the pipeline, which leaves a report beside every checkpoint."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from steelyard.engine import oneshot as pipeline
from steelyard.engine.result import Result
from steelyard.report import write_report

__all__ = ["oneshot"]


@functools.wraps(pipeline.oneshot)
def oneshot(*args: Any, **options: Any) -> Result:
    return pipeline.oneshot(*args, leave=write_report, **options)


_whole = inspect.signature(pipeline.oneshot)
oneshot.__signature__ = _whole.replace(  # type: ignore[attr-defined]
    parameters=[p for p in _whole.parameters.values() if p.name != "leave"]
)
