"""What the site has beyond the files of docs/: the page of measurements.

`benchmarks/README.md` stands beside the scripts that write it. On the site it is a page like the
others, and links between them are turned so that they hold there too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

BENCHMARKS = Path(__file__).parent.parent / "benchmarks" / "README.md"


def on_files(files: Files, config: Any) -> Files:
    text = BENCHMARKS.read_text(encoding="utf-8")
    files.append(File.generated(config, "benchmarks.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri == "benchmarks.md":
        return markdown.replace("](../docs/", "](")
    return re.sub(r"\]\(\.\./benchmarks/README\.md", "](benchmarks.md", markdown)
