"""Tries regular expressions of recipes and checkpoints in a process that can be stopped.

Python's `re` backtracks: `(.+)+x` takes years on a name of 60 characters and blocks the process. So
a subprocess with a time limit first matches expressions against the names, before
compressed-tensors uses them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable

from steelyard.foreign import show

__all__ = ["PREFIX", "problem_of", "slow_pattern"]

PREFIX = "re:"
LONGEST = 10_000  # characters of an expression
SECONDS = 2.0  # CPU time for one expression on all names
SECONDS_PER_NAME = 5e-5
_WAIT = 120.0  # seconds, if the limit has no effect; much longer, as a machine may be busy
_BRANCHES = re.compile(r"[*+?{|]")

_TRIAL = """
import json, re, signal, sys
given = json.load(sys.stdin)
for pattern in given["patterns"]:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, given["seconds"])  # ends the process
    expression = re.compile(pattern)
    for name in given["names"]:
        expression.match(name)
    print(flush=True)
"""


def problem_of(pattern: str) -> str | None:
    """Return why a `re:` expression does not compile, or is too long; None if it is usable."""
    if not pattern.startswith(PREFIX):
        return None
    if len(pattern) > LONGEST:
        return f"{show(pattern)} has {len(pattern):,} characters; use at most {LONGEST:,}"
    try:
        re.compile(pattern.removeprefix(PREFIX))
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        return f"{show(pattern)} is not a regular expression: {error}"
    return None


def slow_pattern(patterns: Iterable[str], names: Collection[str]) -> str | None:
    """Return a sentence on the first `re:` expression that takes too long on some name, or None.

    An expression with a single repetition or alternative cannot, and starts no process.
    """
    asked = [p for p in dict.fromkeys(patterns) if p.startswith(PREFIX)]
    asked = [p for p in asked if len(_BRANCHES.findall(p)) > 1]
    if not asked or not names:
        return None
    seconds = SECONDS + SECONDS_PER_NAME * len(names)
    given = {
        "patterns": [p.removeprefix(PREFIX) for p in asked],
        "names": list(names),
        "seconds": seconds,
    }
    trial = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _TRIAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        done, _ = trial.communicate(json.dumps(given), timeout=_WAIT + seconds)
    except subprocess.TimeoutExpired:
        trial.kill()
        done, _ = trial.communicate()
    finally:
        if trial.poll() is None:
            trial.kill()
            trial.wait()
    count = done.count("\n")
    if count == len(asked):
        return None
    return (
        f"matching {show(asked[count])} against the {len(names):,} module names takes longer than "
        f"{seconds:.0f} s; write it without a repetition inside a repetition, such as (.*)*"
    )
