"""From a model to a checkpoint."""
