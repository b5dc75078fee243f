"""The metadata fields of a statistics file, and their types."""

from __future__ import annotations

from typing import Annotated, Any

from compressed_tensors.quantization import QuantizationArgs
from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["StatisticsContent"]

Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Model(_Strict):
    name: str
    config: str


class DataRun(_Strict):
    """One run over a part of the data."""

    data: str
    samples: Count
    tokens: Count
    versions: dict[str, str]


class Kind(_Strict):
    """Observers of one kind: the registered name, the arguments to build one, its properties."""

    name: str
    args: dict[str, Any]
    identity: dict[str, Any]

    @field_validator("args")
    @classmethod
    def _can_be_built(cls, args: dict[str, Any]) -> dict[str, Any]:
        QuantizationArgs.model_validate(args)
        return args


class StatisticsContent(_Strict):
    """Metadata of a file.

    observers: module, base name, index of its kind, updates, tokens, and the observed dtype
    """

    kind: str
    version: int
    model: Model
    recipe: str
    samples: Count
    tokens: Count
    runs: Annotated[list[DataRun], Field(min_length=1)]
    weights: dict[str, str]
    kinds: list[Kind]
    observers: list[tuple[str, str, Count, Count, Count, str | None]]
