"""Checkpoints on disk: reading them lazily, writing and checking them."""

from steelyard.checkpoint.config_file import quantization_config_dict
from steelyard.checkpoint.findings import Finding, Findings
from steelyard.checkpoint.shards import Shards, TensorInfo
from steelyard.checkpoint.validator import check_checkpoint, validate_checkpoint
from steelyard.checkpoint.view import CheckpointView
from steelyard.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointView",
    "CheckpointWriter",
    "Finding",
    "Findings",
    "Shards",
    "TensorInfo",
    "check_checkpoint",
    "quantization_config_dict",
    "validate_checkpoint",
]
