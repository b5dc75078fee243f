"""Examines a checkpoint as vLLM will read it; every finding has a severity and a remedy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from steelyard.checkpoint import Findings
from steelyard.checkpoint.digests import Watch, unwatched
from steelyard.checkpoint.findings import WARNING
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.doctor.parallelism import Parallelism
from steelyard.doctor.serving import Served, serving
from steelyard.doctor.suspicious import copies, outliers
from steelyard.doctor.validation import validate_folder
from steelyard.errors import CheckpointError

__all__ = ["Examination", "examine"]


@dataclass
class Examination:
    """The findings, and how vLLM serves the checkpoint.

    served:   layers of vLLM and the implementation of each
    parallel: numbers of processes that tensor parallelism can use, up to 8
    """

    findings: Findings
    served: list[Served] = field(default_factory=list)
    parallel: list[int] = field(default_factory=list)


def examine(
    folder: str | Path,
    base: str | Path | None = None,
    *,
    full: bool = False,
    tensor_parallel: int = 1,
    watch: Watch = unwatched,
) -> Examination:
    """Examine a checkpoint of compressed-tensors, whatever wrote it.

    base:            folder of the original model: rows of every weight are decoded and compared
    full:            decode all rows
    tensor_parallel: number of processes that the server will use
    watch:           shows progress
    """
    folder = Path(folder)
    findings = validate_folder(folder, None if base is None else Path(base), full, watch)
    found = Examination(findings)
    try:
        written = WrittenCheckpoint(folder, None)
    except CheckpointError:  # among the findings
        return found
    with written.shards:
        found.served, misread = serving(written)
        findings.found += misread
        if findings.digests is None:  # else every byte is known
            findings.add("outlier", outliers(written), WARNING)
            findings.add("copies", copies(written, watch), WARNING)
        splits = Parallelism(written)
        found.parallel = splits.possible()
        if tensor_parallel > 1:
            findings.add("parallel", splits.indivisible(tensor_parallel))
    return found
