"""Runs a plan: block by block with data, or file by file without."""
