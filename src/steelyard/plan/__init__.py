"""Plans a run before any work: the modules to quantize, the recipe's problems, and its cost."""
