"""Every test starts from the same random state, with nothing compiled."""

import sys

import pytest
import torch

from torchrope.ops import native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", help="a library of kernels for CPUs to test in the place of the installed one")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--kernels")
    if path is not None:
        native.LIBRARY = native.load(path)


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """The compiler makes symbols of shapes that it has met otherwise in another test."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
