"""Other people's detection and segmentation models on this library's backbones."""
