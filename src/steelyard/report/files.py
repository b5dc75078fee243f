"""The two files of a report, each either as it was or as it should be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.errors import ReportError
from steelyard.pipelines.result import Result
from steelyard.report.report import Report

__all__ = ["HTML", "JSON", "add_evaluation", "read_report", "write_files", "write_report"]

JSON, HTML = "report.json", "report.html"


def write_report(
    result: Result, folder: str | Path, evaluation: Mapping[str, Any] | None = None
) -> None:
    """Write the report of a run beside its checkpoint, which lies in `folder`."""
    write_files(Report.of(result, evaluation, Path(folder)), folder)


def write_files(report: Report, folder: str | Path) -> None:
    """Write report.json and report.html, over what is there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / HTML, report.to_html())
    _replace(folder / JSON, report.to_json() + "\n")


def read_report(folder: str | Path) -> Report:
    """Read the report that lies beside a checkpoint."""
    path = Path(folder) / JSON
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ReportError(
            f"{path} cannot be read: {error.strerror}; steelyard.oneshot writes it beside each "
            "checkpoint, write_files anywhere"
        ) from None
    try:
        return Report.from_json(text)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None


def add_evaluation(folder: str | Path, evaluation: Mapping[str, Any]) -> Report:
    """Put an evaluation into the report of a finished checkpoint, in place of an earlier one."""
    before = read_report(folder).model_dump()
    report = Report.model_validate({**before, "evaluation": dict(evaluation)})
    write_files(report, folder)
    return report


def _replace(path: Path, text: str) -> None:
    """Write a file aside, wait until it is on the disk, and put it in place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error
