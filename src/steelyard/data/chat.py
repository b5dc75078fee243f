"""Renders a checkpoint's chat template in a subprocess, with limits on time and memory.

A template is code written by the author of the checkpoint. transformers sandboxes it from files and
other objects, but does not stop endless loops or unbounded strings. The subprocess takes a second
or two to start, and is kept for all conversations.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from steelyard.errors import DataError

__all__ = ["ChatRenderer"]

SECONDS = 10.0  # CPU time per conversation
LONGEST = 1 << 26  # characters of a rendered conversation
MEMORY = 4 << 30  # bytes of address space, including memory that libraries only reserve

_CHILD = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
limits = json.loads(sys.stdin.readline())
try:
    import resource, signal
    limit = lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
except ImportError:
    limit = lambda seconds: None
else:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    except (OSError, ValueError):  # macOS has the name, and refuses the limit
        pass
for line in sys.stdin:
    given = json.loads(line)
    limit(limits["seconds"])  # ends the process
    try:
        (text,), _ = render_jinja_template(
            conversations=[given["messages"]], chat_template=given["template"], **given["tokens"]
        )
        answer = {"text": text}
        if len(text) > limits["longest"]:
            answer = {"error": f"it has more than {limits['longest']:,} characters"}
    except Exception as error:
        answer = {"error": f"{error}"[:1000] or type(error).__name__}
    limit(0)
    print(json.dumps(answer), flush=True)
"""


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template, as `apply_chat_template` does.

    template: replaces the tokenizer's, such as a processor's
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        from transformers import PreTrainedTokenizerBase

        self.tokenizer = tokenizer
        self.template = template
        usual = PreTrainedTokenizerBase.apply_chat_template
        self._is_usual = getattr(type(tokenizer), "apply_chat_template", None) is usual
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: Sequence[Any]) -> str:
        """Return the text of a conversation; raise if it or the template is faulty."""
        if (
            not self._is_usual and self.template is None
        ):  # the tokenizer has its own code and takes no template
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False))
        template = self.template or self.tokenizer.get_chat_template()
        tokens = {k: str(v) for k, v in self.tokenizer.special_tokens_map.items()}
        given = {"messages": list(messages), "template": template, "tokens": tokens}
        answer = self._ask(json.dumps(given, default=_plain))
        if "error" in answer:
            raise DataError(answer["error"])
        return str(answer["text"])

    def _ask(self, line: str) -> dict[str, Any]:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        reply = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        if not reply:
            self._process = None
            raise DataError(
                f"it needs more than {SECONDS:.0f} s, or more than {MEMORY >> 30} GiB of memory"
            )
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        limits = {"seconds": SECONDS, "longest": LONGEST, "memory": MEMORY}
        process.stdin.write(f"{json.dumps(limits)}\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot encode, such as a numpy array."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return f"<{type(value).__name__}>"
