"""Several processes that do one run together, as `torchrun` starts them."""

from steelyard.distributed.dealing import deal, lanes_of, share
from steelyard.distributed.ranks import Ranks, join_from_environment, together

__all__ = ["Ranks", "deal", "join_from_environment", "lanes_of", "share", "together"]
