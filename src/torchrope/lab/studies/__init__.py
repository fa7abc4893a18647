"""Experiments, one file each: they train and measure, and leave typed results in plain files. No plotting."""
