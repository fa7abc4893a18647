"""Other people's detection and segmentation models on this library's backbones."""

IGNORED = 255
"""The class of pixels that have none."""
