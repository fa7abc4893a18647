"""Save, load and convert checkpoints."""
