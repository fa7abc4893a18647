"""Encodings in models of timm, transformers and diffusers; published checkpoints; saving and loading."""
