"""Data sets to train on: real digits, moving digits, Fashion-MNIST, and anybody's own folder of images.

`config.data_config` names one and `build.make_data` makes its `datamodule.DataModule`. Nothing is imported
here, so that the command line can describe its options at once.
"""
