"""Checkpoints that papers published, read into the models of this library."""
