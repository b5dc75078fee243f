"""The progress of a run, as the journal records it for a resumed run."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.errors import CheckpointError

__all__ = ["Mark"]

Count = Annotated[int, Field(ge=0)]


class Mark(BaseModel):
    """Progress of one rank.

    done:         number of finished layers
    streamed:     shard -> number of its finished jobs
    calibrated:   whether all modules are calibrated and written
    finished:     number of algorithms that have finished the complete checkpoint
    modules:      module -> error, tokens and details, as in `ModuleResult`
    weights_only: module -> its scheme, which replaces the recipe's
    unseen:       modules that saw no token
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    done: Count
    streamed: dict[Count, Count]
    calibrated: bool
    finished: Count
    modules: dict[str, tuple[float | None, Count, dict[str, Any]]]
    weights_only: dict[str, dict[str, Any]]
    unseen: list[str]
    notes: list[str]

    @classmethod
    def of(cls, progress: dict[str, Any]) -> Mark:
        """Return the mark of a journal entry."""
        try:
            return cls.model_validate_json(json.dumps(progress))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(
                f"the journal of the unfinished run was damaged (progress.{where}: "
                f"{first['msg']}); start anew with resume=False"
            ) from error
