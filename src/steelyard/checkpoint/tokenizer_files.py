"""Files of a folder that belong to a tokenizer or processor, by transformers' names."""

from __future__ import annotations

import stat
from pathlib import Path

from steelyard.checkpoint.model_files import is_tokenizer_file
from steelyard.checkpoint.other_files import can_be_copied, entries
from steelyard.checkpoint.untrusted_files import mode_of

__all__ = ["tokenizer_files"]


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer or processor in `folder`, relative to it.

    The folder may hold other files, such as keys and data, which are not read.
    """
    root, found = folder.resolve(), []
    for path in entries(folder):
        inside = stat.S_ISDIR(mode_of(path)) and is_tokenizer_file(Path(path.name, "x.jinja"))
        for file in entries(path) if inside else [path]:
            relative = file.relative_to(folder)
            if is_tokenizer_file(relative) and can_be_copied(file, root):
                found.append(relative)
    return sorted(found)
