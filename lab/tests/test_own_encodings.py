"""User-defined encodings by name: found, imported only if typed or allowed, errors in one line."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from labs import OPTIONS, Run

import torchrope as tr
from torchrope.encodings.names import BUILT_IN, KINDS
from torchrope_lab.encodings import load_modules, resolve_encoding, user_defined_parts
from torchrope_lab.engine.descriptions import description_of, label
from torchrope_lab.results import Row, StudyResult
from torchrope_lab.settings.run_config import ModelConfig
from torchrope_lab.training.models import _rotary
from torchrope_lab.training.run import load

MODULE = '''
from pathlib import Path

import torch
import torchrope as tr

Path(__file__).with_name("imported").touch()


class Spiral(tr.Encoding):
    """One learned frequency for all pairs and axes of a head."""

    def __init__(self, *, num_axes, num_heads, head_dim):
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=2)
        self.frequency = torch.nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.normal_(self.frequency)

    def generators(self):
        return tr.encodings.planar(self.frequency[None, :, None].expand(self.num_axes, -1, self.num_blocks))


class Blocks(tr.LieRE):
    title = "LieRE of my own"


class Table(tr.LearnedAPE):
    pass


class Offsets(tr.RelativePositionBias):
    pass


class Unfinished(tr.Encoding):
    pass


class Greedy(Spiral):
    def __init__(self, speed, **others):
        super().__init__(**others)


tr.register_encoding("slow-turns", Spiral, exist_ok=True)
helper = 3


def __getattr__(name):
    Path(__file__).with_name("asked").touch()
    return Spiral
'''
TRAIN = ["train", *OPTIONS, "--trainer.enable_progress_bar=false"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `own_package` with a module `turns`, in the working directory, which is not on the path."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "turns.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('two\\nlines')\n")
    (tmp_path / "lacking.py").write_text("import no_such\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield folder
    forget()


def forget() -> None:
    """As in a process that has imported none of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own_package", "broken", "lacking")]:
        del sys.modules[name]
    for _, named in KINDS:
        for name in [name for name in named if name not in BUILT_IN]:
            del named[name]


def imported(folder: Path) -> bool:
    return (folder / "imported").exists()


def test_names_of_users_classes_are_found_beside_the_librarys(package: Path) -> None:
    path = list(sys.path)
    load_modules(["mixed", "learned+own_package.turns:Blocks:4", "own_package.turns:Spiral"])
    assert sys.path == path
    module = sys.modules["own_package.turns"]
    both = resolve_encoding("learned+own_package.turns:Blocks:4")
    assert both.parts == [tr.LearnedAPE, module.Blocks]
    assert both.rotary(num_axes=2, num_heads=2, head_dim=8).block_size == 4
    assert resolve_encoding("own_package.turns:Spiral").rotary is module.Spiral
    three = resolve_encoding("own_package.turns:Table+own_package.turns:Offsets+own_package.turns:Spiral")
    assert three.parts == [module.Table, module.Offsets, module.Spiral]
    assert resolve_encoding("learned+liere:8").name == tr.encodings.parse_encoding("learned+liere:8").name
    assert user_defined_parts("bias+liere:8") == []
    with pytest.raises(ValueError, match="block size must be a whole number of 2 or more, got 'liere:eight'"):
        resolve_encoding("liere:eight")  # the library's names come first


def test_label_is_the_title_of_the_class_or_its_name(package: Path) -> None:
    load_modules(["own_package.turns:Blocks"])
    assert label("learned+own_package.turns:Blocks:4") == "learned APE + LieRE of my own, blocks of 4"
    assert label("own_package.turns:Table+own_package.turns:Spiral") == "Table + Spiral"
    assert label("liere:8") == "LieRE, blocks of 8"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_package.turns:Spirla", "own_package.turns has no class Spirla; did you mean 'Spiral'"),
        ("own_package.turn:Spiral", "No module named 'own_package.turn'"),
        ("broken:Spiral", r"got broken: RuntimeError: two lines \(broken.py, line 2\)"),
        ("lacking:Spiral", r"got lacking: ModuleNotFoundError: No module named 'no_such' \(lacking.py, line 1\)"),
        ("own_package.turns:helper", "must be a subclass of Encoding, AbsoluteEncoding or .*, got int"),
        ("own_package.turns:Path", "must be a subclass of .*, got an unrelated class"),
        ("own_package.turns:Unfinished", "must implement all abstract methods, got a class without generators"),
        ("own_package.turns:Greedy", "must be built from num_axes, num_heads, head_dim only, got: missing .* 'speed'"),
        ("own_package.turns:Spiral:8", "must accept block_size to be named with a number, got 'own_package.*:8'"),
        ("own_package.turns:Blocks:1", "block size must be a whole number of 2 or more, got"),
        ("own_package.turns:Table:8", "an encoding must be one of none, .* got 'own_package.turns:Table:8'"),
        ("mixed+own_package.turns:Spiral", "at most one absolute, one score bias and one rotary name"),
    ],
)
def test_invalid_encoding_is_refused_in_one_line(name: str, message: str, package: Path, run: Run) -> None:
    for command in (["compare", f"--encodings=none,{name}"], ["train", "--encoding", name]):
        status, _, error = run(*command, "--out=out")
        assert (status, error.count("\n")) == (2, 1)
        with pytest.raises(ValueError, match=message):
            raise ValueError(error)
    assert not Path("out").exists()
    assert not (package / "asked").exists()


def test_shared_heads_need_a_class_that_supports_them(package: Path) -> None:
    load_modules(["own_package.turns:Spiral"])
    sharing = ModelConfig(share_heads=True)
    with pytest.raises(ValueError, match=r"share_heads is for encodings that take shared_heads, got own_package.turns"):
        _rotary(resolve_encoding("own_package.turns:Spiral"), sharing)
    blocks = _rotary(resolve_encoding("own_package.turns:Blocks"), sharing)
    assert blocks(num_axes=2, num_heads=2, head_dim=8).shared_heads


@pytest.mark.slow
def test_stored_run_imports_nothing_that_was_not_allowed(package: Path, run: Run) -> None:
    assert run(*TRAIN, "--encoding=own_package.turns:Spiral", "--out=run")[0] == 0
    (package / "imported").unlink()
    message = "'own_package.turns:Spiral' is imported only if the command line names it: add --allow own_package.turns"
    for command in (["evaluate", "run"], [*TRAIN, "--config=run/config.yaml", "--out=other"]):
        for allow in ([], ["--allow=own_pack,own_package.other"]):
            forget()
            status, _, error = run(*command, *allow)
            assert status == 2
            assert message in error
            assert not imported(package)
    with pytest.raises(ValueError, match=r"'own_package.* is imported only if the command line names it"):
        load(Path("run"))

    forget()
    status, measured, _ = run("evaluate", "run", "--allow=torch,own_package", "--json")
    assert status == 0
    assert imported(package)
    forget()
    assert run("evaluate", "run", "--allow", "own_package.turns", "--json")[:2] == (0, measured)
    forget()
    assert run(*TRAIN, "--config=run/config.yaml", "--allow=own_package", "--out=run")[0] == 0  # finished already


def test_loaded_modules_give_no_access_to_other_code(package: Path) -> None:
    for name in ("os:system", "subprocess:Popen", "torch.hub:load", "__main__:x"):
        with pytest.raises(ValueError, match=r"must be a subclass of|has no class"):
            resolve_encoding(name)
    with pytest.raises(ValueError, match=r"'own_package.turns.* is imported only if the command line names it"):
        resolve_encoding("own_package.turns:Spiral")
    load_modules(["own_package.turns:Spiral"], allow=["own", "own_package.turns.more", ""])
    assert not imported(package)


def results() -> dict[str, Row]:
    """The first table of the comparison, by name."""
    return {str(row["name"]): row for row in StudyResult.read(Path("out/results.json")).findings.tables[0].rows}


@pytest.mark.slow
def test_comparison_resumes_and_its_report_needs_no_user_code(package: Path, run: Run) -> None:
    name = "learned+own_package.turns:Spiral"
    compare = ["compare", *OPTIONS, "--seeds=1", "--scales=[1.0]", "--out=out"]
    status, printed, _ = run(*compare, f"--encodings=none,{name}")
    assert status == 0
    rows = results()
    assert set(rows) == {"none", name}
    assert rows[name]["encoding"] == "learned APE + Spiral"
    assert name in printed
    assert name in Path("out/report/index.html").read_text()
    assert list(Path("out/runs").glob("digits-learned-and-own_package.turns-Spiral-seed0-*/result.json"))

    (package / "imported").unlink()
    forget()
    assert run("report", "out")[0] == 0
    status, _, error = run(*compare, "--encodings=none")
    assert status == 2
    assert "--allow own_package.turns" in error
    assert not imported(package)
    status, printed, _ = run(*compare, "--encodings=none", "--allow=own_package")
    assert status == 0
    assert "run 1 of" not in printed  # nothing was trained again
    assert {each: row["top1"] for each, row in results().items()} == {each: row["top1"] for each, row in rows.items()}

    forget()
    Path("mine.yaml").write_text(yaml.safe_dump({"encodings": [name]}))
    assert run(*compare[:-1], "--config=mine.yaml", "--out=new")[0] == 2
    assert not Path("new").exists()


@pytest.mark.slow
def test_user_defined_encoding_trains_in_other_processes(package: Path, run: Run) -> None:
    names = "own_package.turns:Spiral,own_package.turns:Blocks"
    asked = ["study", "capacity", *OPTIONS, "--seeds=1", "--model.num_heads=2", "--out=out"]  # blocks of 2, 4 and 8
    status, printed, error = run(*asked, f"--encodings={names}", "--parallel=2")
    assert status == 0, error
    assert "capacity (digits)" in printed
    folders = sorted(path.name.rpartition("-")[0] for path in Path("out/runs").glob("digits-*"))
    assert folders == [f"digits-own_package.turns-Blocks-{size}-seed0" for size in (2, 4, 8)]
    left_out = json.loads(Path("out/capacity-digits.json").read_text())["left_out"]
    assert any("own_package.turns:Spiral" in reason for reason in left_out)


def test_library_imports_no_user_code(package: Path) -> None:
    with pytest.raises(ValueError, match="an encoding must be one of none"):
        tr.encodings.parse_encoding("own_package.turns:Spiral")


def test_name_that_a_module_registers_is_found_with_and_without_its_module(package: Path) -> None:
    name = "learned+own_package.turns:slow-turns"
    with pytest.raises(ValueError, match=r"'own_package.turns:slow-turns' is imported only if the command"):
        resolve_encoding(name)
    load_modules([name])
    spiral = sys.modules["own_package.turns"].Spiral
    for known in (name, "learned+slow-turns"):
        assert resolve_encoding(known).parts == [tr.LearnedAPE, spiral]
        assert label(known) == "learned APE + Spiral"
    assert [label("dinov3"), label("learned-jittered")] == ["RoPE, DINOv3", "learned APE, jittered"]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_encoding_of_the_library_is_described_from_its_docstring(name: str) -> None:
    found = description_of(name)
    assert found.title
    assert found.summary.endswith(".")
    assert "\n" not in f"{found.formula}{found.summary}{found.source}"
    assert found.source or name == "none"


def test_description_is_split_into_summary_formula_and_source() -> None:
    found = description_of("mixed")
    assert found.summary == "Rotate each pair of channels along all axes."
    assert found.formula == "φ_j = sum_a p_a θ_aj,  θ learned"
    assert found.source.startswith("Heo et al., Rotary Position Embedding for Vision Transformer")
    assert description_of("fire").formula.startswith("b_h(p, p') = f_h( log(c")
