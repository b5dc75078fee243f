"""What a recipe will do to a model, what cannot work, and what it costs; before any work."""
