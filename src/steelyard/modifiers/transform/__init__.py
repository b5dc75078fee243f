"""The path by which llm-compressor's users know `IMatrixGatherer`."""
