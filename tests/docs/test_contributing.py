"""What CONTRIBUTING prints adds an encoding, a model family, a study and a data set to a copy of the sources."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SMALL = (
    "--seeds=1 --epochs=1 --optim.warmup_epochs=0 --model.dim=16 --model.depth=1 --model.num_heads=1 "
    "--data.train_size=40 --data.val_size=20 --out=out"
)
NUMBERS = {"one": 1, "two": 2, "three": 3, "six": 6, "eight": 8, "nine": 9, "thirteen": 13}


def section(title: str) -> str:
    """Return the section of the page with a title."""
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def files_of(text: str) -> list[str]:
    """Return the Python files that a section prints."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def lines_of(text: str) -> tuple[int, int]:
    """Return the number of lines of the printed files, without blank ones, and of lines that the printed diffs add."""
    written = [line for file in files_of(text) for line in file.splitlines()[1:] if line]
    return len(written), len(re.findall(r"^\+(?!\+\+ )", text, re.MULTILINE))


def apply(text: str, root: Path) -> None:
    """Write the printed files, and add each line of a diff after the line before it, without one to the end."""
    for file in files_of(text):
        path = root / re.match(r"# (\S+)\n", file)[1]  # type: ignore[index]
        assert not path.exists()
        path.write_text(file, encoding="utf-8")
    for diff in re.findall(r"^```diff\n\+\+\+ (.*?)^```$", text, re.DOTALL | re.MULTILINE):
        name, _, hunk = diff.partition("\n")
        lines, place = (root / name).read_text(encoding="utf-8").splitlines(), None
        for line in hunk.splitlines():
            if line.startswith(" "):
                [place] = [at for at, found in enumerate(lines) if found == line[1:]]
            else:
                place = len(lines) - 1 if place is None else place
                lines.insert(place + 1, line[1:])
                place += 1
        (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of both packages with everything that the page adds."""
    root = tmp_path_factory.mktemp("clone")
    for package in ("src/torchrope", "lab/src/torchrope_lab"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    for title in ("Add an encoding", "Add a model family to `swap`", "Add a study", "Add a data set"):
        apply(section(title), root)
    return root


def run(root: Path, *arguments: str) -> str:
    """Run Python on the copy."""
    path = os.pathsep.join([str(root / "src"), str(root / "lab/src")])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command_of(title: str) -> list[str]:
    """Return the arguments of the command that a section prints."""
    return shlex.split(re.search(r"Then `torchrope (.*?)`", section(title))[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("title", "pattern"),
    [
        ("Add an encoding", r"(\w+) lines, and (\w+) that name it"),
        ("Add a model family to `swap`", r"(\w+) line if"),
        ("Add a study", r"is (\w+) lines, and (\w+) in the registry"),
        ("Add a data set", r"(\w+) lines for images in memory, and (\w+) for its settings"),
    ],
)
def test_section_has_as_many_lines_as_it_says(title: str, pattern: str) -> None:
    said = [NUMBERS[number.lower()] for number in re.search(pattern, section(title)).groups()]  # type: ignore[union-attr]
    assert [count for count in lines_of(section(title)) if count] == said


@pytest.mark.slow
def test_added_encoding_has_all_properties(sources: Path) -> None:
    code = """
from functools import partial
import torchrope as tr
print(tr.__file__)
build = tr.encodings.parse_encoding("diagonal").rotary
print(build(num_axes=2, num_heads=1, head_dim=4)([[1.0, 3.0]]).angles().tolist())
for name in ("tensors are parameters or buffers", "rotations are orthogonal", "scores are relative where claimed"):
    tr.testing.PROPERTIES[name](partial(build, num_axes=2, num_heads=2, head_dim=8))
"""
    told = run(sources, "-c", code).splitlines()
    assert told == [str(sources / "src/torchrope/__init__.py"), "[[[4.0, 2.0]]]"]


@pytest.mark.slow
def test_added_family_is_swapped_with_equal_outputs(sources: Path) -> None:
    pytest.importorskip("transformers")
    code = """
import pytest, torch, transformers, torchrope as tr
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
config = transformers.ViTMSNConfig(**sizes, image_size=32, patch_size=8)
model, images = transformers.ViTMSNModel(config).eval(), torch.randn(2, 3, 32, 32)
"""
    run(ROOT, "-c", f"{code}with pytest.raises(ValueError, match='swap supports the models'): tr.swap(model, 'mixed')")
    check = """
before = model(images).last_hidden_state
assert torch.equal(tr.swap(model, "mixed")(images).last_hidden_state, before)
torch.nn.init.normal_(model.rotary.encodings[0].frequencies)
assert not torch.allclose(model(images).last_hidden_state, before)
"""
    run(sources, "-c", code + check)


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Add an encoding", "Add a study", "Add a data set"])
def test_printed_command_runs(title: str, sources: Path) -> None:
    shutil.rmtree(sources / "out", ignore_errors=True)
    command = command_of(title)
    few = [] if any(part.startswith("--encodings") for part in command) else ["--encodings=none,axial"]
    run(sources, "-m", "torchrope_lab", *command, *few, *SMALL.split())
    report = (sources / "out/report/index.html").read_text(encoding="utf-8")
    name = {"encoding": "Diagonal", "study": "Dropout", "data set": "Stripes"}[title.split(maxsplit=2)[2]]
    assert name in report
