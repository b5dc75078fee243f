"""An earlier run for the same output: whether it finished, and whether this one may resume it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steelyard.checkpoint.growing_shards import are_in_place
from steelyard.checkpoint.place import check_output
from steelyard.checkpoint.work_folder import WorkFolder
from steelyard.errors import CheckpointError

__all__ = ["EarlierRun"]


class EarlierRun:
    """An earlier run, if there was one.

    identity: inputs of this run; None where it cannot be resumed
    resume:   False starts anew in any case
    """

    def __init__(self, work: WorkFolder, identity: dict[str, Any] | None, resume: bool) -> None:
        self.work = work
        self.identity = identity
        self.resume = resume

    @property
    def is_finished(self) -> bool:
        """Whether the run finished, and was killed before it could say so."""
        if self.identity is None or not self.resume:
            return False
        journal = self._journal_in_place()
        return journal is not None and journal["identity"] == self.identity

    def _journal_in_place(self) -> dict[str, Any] | None:
        """Return the journal of a run whose checkpoint is in place."""
        output = self.work.output
        journal = self.work.read() if output.is_dir() else None
        if journal is None or not journal["complete"]:
            return None
        if self.work.checkpoint.exists() and output.stat().st_ino != journal["folder"]:
            return None
        return journal if are_in_place(output, journal["shards"]) else None

    def check_output(self, overwrite: bool, keep_tokenizer: bool) -> None:
        """Refuse an output that must not be replaced; remove leftovers of a finished run."""
        try:
            ended = self._journal_in_place() is not None
            useless = ended or not self.work.read_all()
        except CheckpointError:  # a damaged journal is reported when the run resumes
            ended = useless = False
        if useless:
            self.work.remove_leftover()
        try:
            check_output(self.work.output, overwrite, keep_tokenizer)
        except CheckpointError as error:
            if not ended or overwrite:
                raise
            raise CheckpointError(
                f"{self.work.output} is complete: an earlier run wrote it, and was killed before "
                "it could say so; choose another folder, or replace it with overwrite=True"
            ) from error

    def journals(self) -> list[dict[str, Any]]:
        """Return the journals of all ranks to resume from; none where this run starts anew.

        Refuses to erase another run, or to resume one with other inputs.
        """
        output = self.work.output
        unfinished = self.work.journal.exists() or self.work.has_ranks()
        if self.identity is None:
            if self.resume and unfinished:
                raise CheckpointError(
                    f"an unfinished run for {output} is kept in {self.work.path}; finish it with "
                    "the command that started it, choose another output, or remove that folder"
                )
            return []
        found = self.work.read_all() if self.resume else []
        if not found and self.is_finished:
            found = [journal for journal in (self.work.read(),) if journal is not None]
        lines = (line for each in found for line in _differences(each["identity"], self.identity))
        if changed := list(dict.fromkeys(lines)):
            listed = "\n".join(f"  - {line}" for line in changed)
            raise CheckpointError(
                f"an unfinished run for {output} was started with other inputs:\n{listed}"
                "\nUse the same inputs to resume it, or start anew with resume=False."
            )
        return found


def _differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield one line per input that differs between two identities."""
    for key in {**before, **now}:
        name = f"{path}{key}"
        first, second = before.get(key), now.get(key)
        if isinstance(first, dict) and isinstance(second, dict):
            yield from _differences(first, second, f"{name}: ")
        elif first != second:
            yield f"{name} was {_short(first)}, and is {_short(second)}"


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value).strip()
    return text if len(text) <= 60 else f"{text[:57]}..."
