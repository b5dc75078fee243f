"""Builds one HTML page from a template, its style, its scripts and the report as data.

The data is in a script element that never runs, with all characters escaped that could end it, and
the scripts insert it as text only. The content security policy allows only the hashes of our own
script and style, so a name in a checkpoint cannot inject code, and the page cannot load anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources

__all__ = ["page_of"]

_STYLES = (
    "palette.css",
    "page.css",
    "sections.css",
    "charts.css",
    "size_chart.css",
    "heat.css",
    "table.css",
    "module.css",
    "verdict.css",
)
_SCRIPTS = (
    "words.js",
    "charts.js",
    "heat.js",
    "scales.js",
    "table.js",
    "module.js",
    "size_chart.js",
    "comparison.js",
    "checkpoints.js",
    "summary.js",
    "verdict.js",
    "tokens.js",
    "evaluation.js",
    "page.js",
)
_UNSAFE = "<>&\u2028\u2029"  # in a script element


def page_of(report: str, name: str | None) -> str:
    """Return the page of a report in JSON.

    name: for the title of the window
    """
    style = "\n".join(map(_file, _STYLES))
    script = '"use strict";\n(() => {\n' + "\n".join(map(_file, _SCRIPTS)) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(f"{name} · Steelyard" if name else "Steelyard"),
        "style": style,
        "data": report.translate({ord(c): f"\\u{ord(c):04x}" for c in _UNSAFE}),
        "script": script,
    }
    pieces = _file("page.html").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:  # one pass, so that inserted text is not expanded again
        key, rest = piece.split("}}", 1)
        filled += [parts[key], rest]
    return "".join(filled)


def _file(name: str) -> str:
    return (resources.files("steelyard.report") / "template" / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
