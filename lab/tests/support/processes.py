"""Helpers for tests of several processes."""

import os
import socket

import torch

from torchrope_lab.data.build import make_data
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.settings.run_config import RunConfig


def data_of(config: RunConfig) -> DataModule:
    data = make_data(config.data)
    data.setup()
    return data


def become_one_of_two(rank: int, port: int) -> None:
    """Make this process what torchrun starts."""
    torch.set_num_threads(1)
    sizes = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "RANK": rank, "LOCAL_RANK": rank}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "two"}
    os.environ.update({name: str(value) for name, value in {**sizes, **place}.items()})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
