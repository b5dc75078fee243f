"""The model to quantize: its files, its class, its decoder layers, and the names in each."""
