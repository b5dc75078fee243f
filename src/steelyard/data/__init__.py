"""Calibration data: turns files, datasets and loaders into token ids."""
