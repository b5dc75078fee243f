"""Observers: from tensors to `scale`, `zero_point` and `global_scale`."""

from importlib import import_module

from steelyard.names import observer_modules
from steelyard.observers.base import Observer, QParamsDict
from steelyard.observers.expanded import NVFP4ExpandedIMatrixObserver, NVFP4ExpandedMSEObserver
from steelyard.observers.helpers import (
    flatten_for_calibration,
    fuse_weight_observers,
    get_observer_token_count,
)
from steelyard.observers.imatrix import IMatrixMSEObserver
from steelyard.observers.min_max import (
    MemorylessMinMaxObserver,
    MinMaxObserver,
    StaticMinMaxObserver,
)
from steelyard.observers.mse import MemorylessMSEObserver, MovingAverageMSEObserver
from steelyard.observers.observer_options import ObserverOptions
from steelyard.observers.optimal import OptimalObserver

__all__ = [
    "IMatrixMSEObserver",
    "MemorylessMSEObserver",
    "MemorylessMinMaxObserver",
    "MinMaxObserver",
    "MovingAverageMSEObserver",
    "NVFP4ExpandedIMatrixObserver",
    "NVFP4ExpandedMSEObserver",
    "Observer",
    "ObserverOptions",
    "OptimalObserver",
    "QParamsDict",
    "StaticMinMaxObserver",
    "flatten_for_calibration",
    "fuse_weight_observers",
    "get_observer_token_count",
]

for _module in observer_modules():  # each registers its observers
    import_module(_module)
