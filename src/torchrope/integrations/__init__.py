"""Use encodings in models of other libraries, load published checkpoints, save and load models."""
