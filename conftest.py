"""Every test starts from the same random state, with nothing compiled and no names of other tests registered."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from torchrope.encodings.names import KINDS
from torchrope.integrations import family
from torchrope.ops import native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", help="a library of kernels for CPUs to test in the place of the installed one")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the modules are imported, hardly an object of which is ever freed
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():  # torch.manual_seed would keep a traceback, which takes a millisecond
            device.manual_seed_all = lambda seed: None
    path = config.getoption("--kernels")
    if path is not None:
        native.LIBRARY = native.load(path)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_state() -> None:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # the compiler makes symbols of shapes that it has met otherwise
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Remove the encodings and model families that a test registers."""
    before, families = [dict(named) for _, named in KINDS], list(family._registered)
    yield
    for (_, named), old in zip(KINDS, before, strict=True):
        if named != old:
            named.clear()
            named.update(old)
    if family._registered != families:
        family._registered[:] = families
        family._families_of.cache_clear()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the CPU kernels that ran."""
    names: list[str] = []
    run = native._run
    monkeypatch.setattr(native, "_run", lambda name, *args: names.append(name) or run(name, *args))
    return names


@pytest.fixture
def threads() -> Iterator[int]:
    """The number of threads of PyTorch, which a test may change."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)
