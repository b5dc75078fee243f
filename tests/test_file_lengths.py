"""No source file is above 300 lines, unless it states a reason."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
LIMIT = 300
KINDS = {".py", ".cpp", ".h", ".hpp", ".js", ".css", ".html"}
REASON = re.compile(rf"^ *(#|//|/\*|<!--) Above {LIMIT} lines: \S", re.MULTILINE)


def problems(root: Path) -> list[str]:
    """Return the long files without a reason, and the short ones with one."""
    found = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in KINDS:
            continue
        text = path.read_text("utf-8")
        lines, excused = text.count("\n"), REASON.search(text) is not None
        if lines > LIMIT and not excused:
            found.append(f"{path.relative_to(root)} has {lines} lines: split it by idea")
        elif lines <= LIMIT and excused:
            found.append(f"{path.relative_to(root)} has {lines} lines: remove the reason")
    return found


def test_no_file_is_too_long() -> None:
    assert problems(SOURCE) == []


def test_long_files_are_found(tmp_path: Path) -> None:
    long = "x = 1\n" * LIMIT
    (tmp_path / "short.py").write_text(long)
    (tmp_path / "long.py").write_text(f"{long}y = 2\n")
    (tmp_path / "excused.cpp").write_text(f"// Above 300 lines: one table\n{long}")
    (tmp_path / "needless.py").write_text("# Above 300 lines: no more\n")
    (tmp_path / "empty.py").write_text(f"# Above 300 lines: \n{long}")
    assert problems(tmp_path) == [
        "empty.py has 301 lines: split it by idea",
        "long.py has 301 lines: split it by idea",
        "needless.py has 1 lines: remove the reason",
    ]
