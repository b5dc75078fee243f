"""Several processes that do one run together, as `torchrun` starts them; and threads within one."""

from steelyard.distributed.crew import Crew
from steelyard.distributed.dealing import deal, lanes_of, share
from steelyard.distributed.packing import sendable
from steelyard.distributed.ranks import Ranks, join_from_environment, together

__all__ = [
    "Crew",
    "Ranks",
    "deal",
    "join_from_environment",
    "lanes_of",
    "sendable",
    "share",
    "together",
]
