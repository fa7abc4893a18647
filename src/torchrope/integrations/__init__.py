"""Encodings where people already are: models of timm and transformers, published checkpoints."""
