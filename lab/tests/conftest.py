"""Fixtures shared by the tests of the laboratory."""

import signal
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from miniatures import published_sums

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it; background jobs of a shell ignore it


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command `torchrope`: its exit status, and what it prints on stdout and on stderr."""
    from torchrope_lab.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def published_miniatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The miniatures of CIFAR are the published files."""
    from torchrope_lab.data import cifar

    for kind, ours in (("10", cifar.Cifar10), ("100", cifar.Cifar100)):
        sums, source = published_sums()[kind], ours.source
        for part in ("train_list", "test_list"):
            monkeypatch.setattr(source, part, [[name, sums[name]] for name, _ in getattr(source, part)])
        monkeypatch.setattr(source, "meta", {**source.meta, "md5": sums[source.meta["filename"]]})
        monkeypatch.setattr(source, "tgz_md5", sums["archive"])


@pytest.fixture(scope="session", autouse=True)
def _scripts_of_pages_are_bundled_once() -> Iterator[None]:
    """Bundling takes a second and gives every page the same text."""
    try:
        import vl_convert
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "javascript_bundle", cache(vl_convert.javascript_bundle))
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The cache folder, also of processes that tests start, is a temporary one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
        yield
