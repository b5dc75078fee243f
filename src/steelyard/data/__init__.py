"""Calibration data: from files, datasets and loaders to token ids."""
