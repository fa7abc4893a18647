"""Data sets for training and validation: images, clips, volumes, points, boxes and semantic maps.

`config.data_config` selects a configuration and `build.make_data` builds its `datamodule.DataModule`. Nothing is
imported here, so that `--help` on the command line is fast.
"""
