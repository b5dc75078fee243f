"""The report: a value that is made of a run, and turned into JSON or a page and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.engine.result import Result
from steelyard.errors import ReportError
from steelyard.report.gather import left_of, modules_of, summary_of
from steelyard.report.page import page_of
from steelyard.report.sections import ComparisonRow, Evaluation, LeftOut, ModuleReport, Summary

__all__ = ["SCHEMA_VERSION", "Report"]

SCHEMA_VERSION = 1


class Report(BaseModel):
    """What is known of a run, or of several that are compared; see the package for examples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    title: str | None = None
    """What the page is called; the model's name where this is None."""
    summary: Summary | None = None
    modules: list[ModuleReport] = Field(default_factory=list)
    left: list[LeftOut] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    recipe: str | None = None
    evaluation: Evaluation | None = None
    comparison: list[ComparisonRow] | None = None

    @classmethod
    def of(
        cls,
        result: Result,
        evaluation: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> Report:
        """Return the report of a run.

        folder: where the checkpoint lies until it is put in place
        """
        modules = modules_of(result)
        return cls(
            summary=summary_of(result, modules, folder or result.output_dir),
            modules=modules,
            left=left_of(result),
            notes=list(result.notes),
            recipe=result.recipe.text,
            evaluation=None if evaluation is None else dict(evaluation),
        )

    def to_json(self) -> str:
        """Return the report on one line, in ASCII."""
        return json.dumps(self.model_dump(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ReportError(f"the report is not JSON: {error}") from None
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise ReportError(
                f"the report has schema_version {version!r}, and this steelyard reads "
                f"{SCHEMA_VERSION}; use the steelyard that wrote it, or write it again"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            raise ReportError(f"the report does not hold at {path}: {first['msg']}") from None

    def to_html(self) -> str:
        """Return one page that needs nothing beside itself."""
        name = self.title or (self.summary.model if self.summary else None)
        return page_of(self.to_json(), name)
