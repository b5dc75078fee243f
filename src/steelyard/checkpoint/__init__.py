"""Checkpoints on disk: reading them lazily, laying out tensors, writing and checking them."""

from steelyard.checkpoint.layout import (
    expected_attention_tensors,
    expected_tensors,
    format_of,
    stored_tensors,
)
from steelyard.checkpoint.shards import Shards, TensorInfo
from steelyard.checkpoint.validator import Findings, check_checkpoint, validate_checkpoint
from steelyard.checkpoint.view import CheckpointView
from steelyard.checkpoint.writer import CheckpointWriter, quantization_config_dict

__all__ = [
    "CheckpointView",
    "CheckpointWriter",
    "Findings",
    "Shards",
    "TensorInfo",
    "check_checkpoint",
    "expected_attention_tensors",
    "expected_tensors",
    "format_of",
    "quantization_config_dict",
    "stored_tensors",
    "validate_checkpoint",
]
