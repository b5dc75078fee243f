"""What the site has beyond the files of docs/: measurements, the API, observers without a section.

`benchmarks/README.md` stands beside the scripts that write it. On the site it is a page like the
others, and links between them are turned so that they hold there too. An observer that
docs/observers.md does not describe is added by `tools/observer_docs.py`. `tools/api_docs.py` makes
the page of the API from docstrings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks" / "README.md"

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]
import api_docs  # noqa: E402

from steelyard.names import observer_modules  # noqa: E402  # which needs no other package


def on_files(files: Files, config: Any) -> Files:
    text = BENCHMARKS.read_text(encoding="utf-8")
    files.append(File.generated(config, "benchmarks.md", content=text))
    files.append(File.generated(config, "api.md", content=api_docs.page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri == "observers.md":
        markdown = with_all_observers(markdown)
    if page.file.src_uri == "benchmarks.md":
        return markdown.replace("](../docs/", "](")
    return re.sub(r"\]\(\.\./benchmarks/README\.md", "](benchmarks.md", markdown)


def with_all_observers(markdown: str) -> str:
    """Return the page with the sections that it lacks, made by a Python that has torch."""
    names = [name for group in observer_modules().values() for name in group]
    if all(f"### `{name}`\n" in markdown for name in names):
        return markdown
    command = [ROOT / ".venv" / "bin" / "python", ROOT / "tools" / "observer_docs.py"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
