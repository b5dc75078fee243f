"""Processes of one run, as `torchrun` starts them, and threads within a process."""

from steelyard.distributed.local_device import local_count, local_index
from steelyard.distributed.packing import sendable
from steelyard.distributed.partition import assign, batches_of, partial_sums_of
from steelyard.distributed.process_group import join_from_environment
from steelyard.distributed.ranks import Ranks, together
from steelyard.distributed.thread_pool import ThreadPool

__all__ = [
    "Ranks",
    "ThreadPool",
    "assign",
    "batches_of",
    "join_from_environment",
    "local_count",
    "local_index",
    "partial_sums_of",
    "sendable",
    "together",
]
