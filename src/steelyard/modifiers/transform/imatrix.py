"""The path by which llm-compressor's users know `IMatrixGatherer`."""

from steelyard.modifiers.imatrix import IMatrixGatherer

__all__ = ["IMatrixGatherer"]
