"""Numbers of every study on a tiny store of runs, before and after a change of the laboratory.

    python benchmarks/same_numbers.py write FOLDER       train the store, and write FOLDER/numbers.json
    python benchmarks/same_numbers.py compare FOLDER     train it again elsewhere, and compare bit by bit

A tiny store is the studies on digits, moving digits, points and generated segments, with every setting explicit, four
encodings and two seeds. Compared are the predictions of every run, and the cells of every table and figure by their
titles; sentences, times and paths may change. `--reuse` compares the studies alone, on the runs of FOLDER.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchrope_lab.cli import main as torchrope

sys.path.append(str(Path(__file__).parents[1] / "lab" / "tests" / "support"))
from miniatures import points, segments

SOME = "accuracy,capacity,shuffle,generators,sharing"
OTHERS = "data-efficiency,training-efficiency,model-size,resolution,pooling,finetune,learning,attention"
FORMULAS = "complexity,fourier,probes"
STUDIES = {"digits": f"{SOME},{OTHERS},{FORMULAS}", "motion": SOME, "points": SOME, "segments": "dense"}
LEARNED, SINUSOIDAL = (f"--encodings={vectors},mixed,liere:8,comrope-ld" for vectors in ("learned", "sinusoidal"))
SETTINGS = {
    "digits": [LEARNED, "--data.train_size=120", "--data.val_size=60", "--model.patch_size=[2]"],
    "motion": [LEARNED, "--data.train_size=120", "--data.val_size=60"],
    "points": [SINUSOIDAL],
    "segments": [LEARNED, "--data.size=32", "--model.patch_size=[8]"],
}
FILES = {"points": points, "segments": segments}
"""Data sets in files, which are written to FOLDER."""
COMMON = [
    "--seeds=2",
    "--epochs=2",
    "--optim.warmup_epochs=0",
    "--optim.lr=0.001",
    "--data.batch_size=20",
    "--data.workers=0",
    "--model.dim=48",
    "--model.depth=2",
    "--model.num_heads=2",
    "--model.mlp_dim=48",
]
TIMES = ("second", "time", "duration", "date", "hours")


def run_all(out: Path, names: list[str], files: Path) -> None:
    """Run the studies on each data set, into a folder for each; `files` has the data sets in files."""
    for name in names:
        root = [f"--data.root={files / name}"] if name in FILES else []
        settings = [f"--data={name}", *root, *COMMON, *SETTINGS[name], f"--out={out / name}"]
        status = torchrope(["study", STUDIES[name], *settings])
        if status:
            sys.exit(f"studies on {name} must end with 0, got {status}")


def collect(out: Path) -> dict[str, Any]:
    """Return the predictions of all runs, hashed, and the numbers of all studies."""
    runs: dict[str, list[str]] = {}
    for file in sorted(out.glob("*/runs/*/result.json")):
        result = json.loads(file.read_text())
        text = json.dumps([result["labels"], result["predicted"], result["val_loss"]])
        name = file.parent.name.rpartition("-")[0]  # without the key of its settings
        runs.setdefault(f"{file.parents[2].name}/{name}", []).append(hashlib.sha256(text.encode()).hexdigest()[:16])
    runs = {name: sorted(hashes) for name, hashes in runs.items()}
    studies = {}
    for file in sorted(out.glob("*/*.json")):
        found = json.loads(file.read_text())["findings"]
        for kind in ("tables", "figures"):
            for part in found[kind]:
                numbers = [{key: cell for key, cell in row.items() if not _is_time(key)} for row in part["rows"]]
                studies[f"{file.parent.name}/{file.stem}/{kind}/{part['title']}"] = numbers
    return {"runs": runs, "studies": studies}


def _is_time(key: str) -> bool:
    return any(word in key.lower() for word in TIMES)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each run or table that is missing, new or different."""
    lines = []
    for kind in ("runs", "studies"):
        for name in {**before[kind], **after[kind]}:
            old, new = before[kind].get(name), after[kind].get(name)
            if old is None or new is None:
                lines.append(f"{'new' if old is None else 'missing'}: {name}")
            elif old != new:
                lines.append(f"different: {name}")
    return lines


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default=",".join(SETTINGS))
    parser.add_argument("--reuse", action="store_true")
    arguments = parser.parse_args()
    names, target = arguments.data.split(","), arguments.folder / "numbers.json"
    files = arguments.folder.resolve() / "files"
    if arguments.what == "write":
        for name in FILES.keys() & {*names}:
            FILES[name](files / name)
        run_all(arguments.folder, names, files)
        target.write_text(json.dumps(collect(arguments.folder), indent=1))
        return
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch)
        if arguments.reuse:
            for name in names:
                shutil.copytree(arguments.folder / name / "runs", again / name / "runs")
        run_all(again, names, files)
        lines = differences(json.loads(target.read_text()), collect(again))
    print(*lines or ["equal"], sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
