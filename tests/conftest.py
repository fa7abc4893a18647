"""Every test starts from the same random state, with nothing compiled."""

import gc
import sys

import pytest
import torch

from torchrope.ops import native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", help="a library of kernels for CPUs to test in the place of the installed one")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the modules are imported, hardly an object of which is ever freed
    path = config.getoption("--kernels")
    if path is not None:
        native.LIBRARY = native.load(path)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_state() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a traceback for each device that is not in use
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    if "torch._dynamo" in sys.modules:  # the compiler makes symbols of shapes that it has met otherwise
        torch._dynamo.reset()
