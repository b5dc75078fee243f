"""The model to quantize: its files, its class, its blocks, and the names in each."""
