"""Reads and writes the two files of a report; each write is atomic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.atomic_file import write_atomic
from steelyard.engine.result import Result
from steelyard.errors import ReportError
from steelyard.evaluate.studies import Study
from steelyard.report.gather import output_summary
from steelyard.report.report import Report
from steelyard.report.sections import decibels

__all__ = [
    "HTML",
    "JSON",
    "add_evaluation",
    "add_study",
    "read_report",
    "report_at",
    "write_files",
    "write_report",
]

JSON, HTML = "report.json", "report.html"
_DATA = re.compile(rb'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)


def write_report(
    result: Result, folder: str | Path, evaluation: Mapping[str, Any] | None = None
) -> None:
    """Write the report of a run beside its checkpoint in `folder`."""
    write_files(Report.of(result, evaluation, Path(folder)), folder)


def write_files(report: Report, folder: str | Path) -> None:
    """Write report.json and report.html, and replace existing ones."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / HTML, report.to_html())
    _replace(folder / JSON, report.to_json() + "\n")


def read_report(folder: str | Path) -> Report:
    """Read the report in the folder of a checkpoint."""
    path = Path(folder) / JSON
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ReportError(
            f"{path} cannot be read: {error.strerror}; pass a folder that steelyard.oneshot or "
            "write_files wrote"
        ) from None
    try:
        return Report.from_json(text)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None


def add_evaluation(folder: str | Path, evaluation: Mapping[str, Any]) -> Report:
    """Add an evaluation to the report of a finished checkpoint; replaces an earlier one."""
    before = read_report(folder).model_dump()
    report = Report.model_validate({**before, "evaluation": dict(evaluation)})
    write_files(report, folder)
    return report


def add_study(folder: str | Path, study: Study) -> Report:
    """Add an evaluation with its verdict to the report of a checkpoint; replaces an earlier one."""
    before = read_report(folder)
    errors = {} if study.diagnosis is None else study.diagnosis.modules
    modules = [
        m.model_copy(update={"output_error": e, "output_snr": decibels(e)})
        if (e := errors.get(m.name)) is not None
        else m
        for m in before.modules
    ]
    summary = before.summary
    if summary is not None and errors:
        summary = summary.model_copy(update=output_summary(modules, "held-out"))
    numbers = study.evaluation.as_dict().items()
    update: dict[str, Any] = {
        "modules": modules,
        "summary": summary,
        "evaluation": {name: v for name, v in numbers if isinstance(v, (int, float))},
        "verdict": study.verdict,
        "tokens": study.tokens,
        "better_recipe": study.recipe,
    }
    if study.diagnosis is not None:
        update["blocks"] = study.diagnosis.blocks
    report = before.model_copy(update=update)
    write_files(report, folder)
    return report


def report_at(path: Path) -> Report | None:
    """Return the report in a JSON or HTML file; None if the file holds none."""
    try:
        text = path.read_bytes()
        if not text.lstrip().startswith(b"{"):
            found = _DATA.search(text)
            text = found[1] if found else b""
        return Report.from_json(text)
    except (OSError, ReportError):
        return None


def _replace(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error
