"""Data sets to train on: pictures, clips, volumes, and scenes with boxes or maps.

`config.data_config` names one and `build.make_data` makes its `datamodule.DataModule`. Nothing is imported
here, so that the command line can describe its options at once.
"""
