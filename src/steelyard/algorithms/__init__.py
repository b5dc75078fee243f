"""What modifiers do in a run, one file each."""
