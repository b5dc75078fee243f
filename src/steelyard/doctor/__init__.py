"""Examines checkpoints as a server will read them, and repairs their configuration."""

from steelyard.doctor.examination import Examination, examine
from steelyard.doctor.repair import repair_folder
from steelyard.doctor.validation import validate_folder

__all__ = ["Examination", "examine", "repair_folder", "validate_folder"]
