"""Several processes that do one run together, as `torchrun` starts them; and threads within one."""

from steelyard.distributed.packing import sendable
from steelyard.distributed.partition import deal, lanes_of, share
from steelyard.distributed.ranks import Ranks, join_from_environment, together
from steelyard.distributed.thread_pool import ThreadPool

__all__ = [
    "Ranks",
    "ThreadPool",
    "deal",
    "join_from_environment",
    "lanes_of",
    "sendable",
    "share",
    "together",
]
