"""Threads of the compiled kernels."""

from __future__ import annotations

import re
import subprocess
import sys

SCRIPT = """
import resource, torch
from steelyard.kernels.range import range_of

torch.set_num_threads(64)
value = torch.randn(1, 4096, 8, 128)
with open("/proc/self/statm") as stream:
    used = int(stream.read().split()[0]) * resource.getpagesize()
limit = used + (24 << 20)  # room for a stack or two, not for 63
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    range_of(value, backend="compiled")
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
low, high = range_of(value, backend="compiled")
assert torch.equal(low, value.amin((0, -1))) and torch.equal(high, value.amax((0, -1)))
print("still alive")
"""


def test_thread_that_cannot_start_is_an_error_and_not_the_end_of_the_process() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, last = run.stdout.splitlines()
    assert re.match(r"cannot start thread \d+ of \d+ \(", first)
    assert last == "still alive"
