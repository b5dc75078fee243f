"""The report of a run: from a result or JSON, to JSON or a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.engine.result import Result
from steelyard.errors import ReportError
from steelyard.evaluate.diagnosis import BlockCost
from steelyard.evaluate.token_figures import TokenFigures
from steelyard.evaluate.verdict import Verdict
from steelyard.report.gather import blocks_of, modules_of, skipped_weights, summary_of
from steelyard.report.page import page_of
from steelyard.report.sections import (
    CheckpointRow,
    ComparisonRow,
    Evaluation,
    ModuleReport,
    SkippedWeight,
    Summary,
)

__all__ = ["SCHEMA_VERSION", "Report"]

SCHEMA_VERSION = 1


class Report(BaseModel):
    """A report on one run, or on several ways to quantize; see the package for examples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    title: str | None = None
    """Title of the page; None for the model's name."""
    summary: Summary | None = None
    modules: list[ModuleReport] = Field(default_factory=list)
    left: list[SkippedWeight] = Field(default_factory=list)
    changed: list[str] = Field(default_factory=list)
    """Tensors of the source that the run changed, before or without quantizing them."""
    notes: list[str] = Field(default_factory=list)
    recipe: str | None = None
    evaluation: Evaluation | None = None
    verdict: Verdict | None = None
    blocks: list[BlockCost] = Field(default_factory=list)
    better_recipe: str | None = None
    """Gives the blocks that cost most the next larger scheme."""
    tokens: TokenFigures | None = None
    comparison: list[ComparisonRow] | None = None
    checkpoints: list[CheckpointRow] = Field(default_factory=list)
    """Several checkpoints of one model, the closest to it first."""

    @classmethod
    def of(
        cls,
        result: Result,
        evaluation: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> Report:
        """Return the report of a run.

        folder: the checkpoint, if it is not in the result's output_dir yet
        """
        modules = modules_of(result)
        return cls(
            summary=summary_of(result, modules, folder or result.output_dir),
            modules=modules,
            blocks=blocks_of(result, modules),
            left=skipped_weights(result),
            changed=sorted(result.changed),
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
                f"the report has schema_version {version!r}, but this version of Steelyard reads "
                f"{SCHEMA_VERSION}; use the version that wrote it, or write it again"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            raise ReportError(f"the report is invalid at {path}: {first['msg']}") from None

    def to_html(self) -> str:
        """Return a self-contained page."""
        name = self.title or (self.summary.model if self.summary else None)
        return page_of(self.to_json(), name)
