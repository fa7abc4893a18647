"""Data sets for training and validation: images, clips, volumes, points, boxes and semantic maps.

`data_config` selects a configuration and `build.make_data` builds its `datamodule.DataModule`. `sets` registers the
built-in data sets without torch, so that `--help` on the command line is fast.
"""

from torchrope_lab.data import sets as sets
