"""What a check of a checkpoint found: each finding with a severity and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from steelyard.checkpoint.against_source import RowsFound
from steelyard.checkpoint.digests import DigestsFound

__all__ = ["ERROR", "REMEDIES", "WARNING", "Finding", "Findings"]

ERROR = "error"
"""A server refuses the checkpoint, or computes something else than the run did."""
WARNING = "warning"
"""Some servers or set-ups cannot use the checkpoint, or a value is unlikely."""

_REPAIR = "`steelyard doctor --repair` writes a config that fits the tensors"

REMEDIES = {
    "file": "download or copy the file again",
    "folder": "download the checkpoint again; `steelyard doctor --repair` writes a new index",
    "provenance": "copy provenance.json again from where the run wrote it, or delete it",
    "digest": (
        "copy the file again from where the run wrote it, or quantize again; if the change was "
        "intended, delete provenance.json"
    ),
    "signature": "get the checkpoint again from its signer, with provenance.json and model.sig",
    "tensor": f"{_REPAIR}; else quantize the model again",
    "scale": "quantize the model again; the module's weights decode to garbage",
    "cache": "quantize the model again with its kv_cache_scheme, or remove that from config.json",
    "config": f"correct config.json: {_REPAIR}",
    "report": "copy the checkpoint again, with its report; its scales are not those of the run",
    "fused": "quantize the model again, with one scheme and one scale for the fused layers",
    "weight": "quantize the model again from this base model; the stored bytes are not its weights",
    "unquantized": "copy the tensor from the base model, or quantize it again",
    "setting": "copy the setting from the base model: `steelyard doctor --base MODEL --repair`",
    "tokenizer": "copy the file from the base model",
    "tied": "quantize the model again without that target",
    "served": f"name the modules in the config as vLLM looks them up: {_REPAIR}",
    "kernel": "quantize the model again with a scheme that vLLM serves: `steelyard ls schemes`",
    "status": f"correct the field: {_REPAIR}",
    "outlier": "compare with the base model: `steelyard doctor --base MODEL --full`",
    "copies": "compare with the base model: `steelyard doctor --base MODEL --full`",
    "parallel": "serve it with fewer processes, or quantize it with a smaller group size",
}
"""Remedy of each kind of check."""


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    check: kind of check, a key of `REMEDIES`
    """

    check: str
    text: str
    severity: str = ERROR

    @property
    def remedy(self) -> str:
        return REMEDIES[self.check]


@dataclass
class Findings:
    """Result of a check, and its coverage.

    found:   empty if the checkpoint is good
    notes:   checks that could not be made, and unusual findings
    rows:    None without a source
    digests: None without provenance.json, or where digests were not compared
    """

    modules: int = 0
    found: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: RowsFound | None = None
    digests: DigestsFound | None = None

    @property
    def problems(self) -> list[str]:
        """The errors, one line each."""
        return [finding.text for finding in self.found if finding.severity == ERROR]

    def add(self, check: str, texts: Iterable[str], severity: str = ERROR) -> None:
        self.found += [Finding(check, text, severity) for text in texts]
