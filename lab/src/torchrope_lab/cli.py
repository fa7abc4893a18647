"""Command line of `torchrope`. Heavy packages are imported only by the commands that need them."""

import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from torchrope_lab import recipes
from torchrope_lab.data.data_config import CropRatio, with_crop_ratio
from torchrope_lab.files import EVALUATION, check_writable
from torchrope_lab.mistakes import IN_ONE_LINE, Mistake
from torchrope_lab.schema import PositiveFloat, PositiveInt
from torchrope_lab.settings.parser import REPLACED, Parsed, as_list, nearest, parse
from torchrope_lab.training.signals import interrupted_by_signals

HELP = """\
usage: torchrope COMMAND [options]

Rotary position encodings for data with any number of axes, and a tool to compare them.

commands:
  compare      train the same model once per encoding; report accuracy and cost of each
  train        train one model
  evaluate     measure a trained model
  study        repeat a study of the papers on data of your choice; --list names them
  report       rebuild the HTML page from the results in a folder
  recipes      list the training settings of papers, or print one

  torchrope COMMAND --help    print the common options of a command; --help all prints all
  torchrope COMMAND --debug   show the traceback of any error
  torchrope --version         print the version

first steps:
  torchrope compare                                    handwritten digits, about fifteen minutes on two CPU cores
  torchrope compare --data motion                      moving digits: time, height, width
  torchrope compare --data images --data.root DIR      your own images, one folder per class
  torchrope compare --data videos --data.root DIR      your own videos; volumes: DICOM or NIfTI (docs/data.md)
  torchrope compare --data points --data.root DIR      your own sets of points, or time series (docs/data.md)
  torchrope study dense --data coco --data.root DIR    segmentation and detection
  torchrope compare --recipe liere-cifar100-vit-b      training settings of a paper; torchrope recipes lists them
"""

COMPARE = """\
Train the same transformer once per position encoding, on the same data, seeds and schedule, and write
OUT/report/index.html with the accuracy and the cost of each encoding. The same command resumes an interrupted one.

Encodings: none, learned, sinusoidal, bias, lookhere, alibi, fire, axial, mixed, liere, comrope-ap, comrope-ld, string,
golden, dinov3, mrope, mrope-interleaved, visionllama, comrope-rope, comrope-liere, learned-jittered, nd, spiral, drope,
mhrope, videorope; with a block size as liere:8; several combined as learned+mixed or bias+axial. A user-defined class
is given as mypackage.module:Class; if a file and not the command line names it, add --allow mypackage.

Lists are written as a,b,c. Defaults (in parentheses) depend on --data and --recipe: combine either with --help.
"""

STUDY = """\
Repeat a study of the papers on data of your choice: torchrope study NAME, where NAME is one that --list prints,
mypackage.module:STUDY for your own, several as a,b,c, or all. Writes runs, a JSON file per study and a report to OUT.

Studies share runs, and the same command resumes an interrupted study. Each has a default list of encodings. Not all
take --reference, --checkpoint, --sizes, --folds and --probes.* (--help probes): an error names those that do.
Lists are written as a,b,c. Defaults (in parentheses) depend on --data and --recipe: combine either with --help.
"""

TRAIN = """\
Train one model: torchrope train --data digits --encoding liere:8 --out runs/liere8. The same command resumes an
interrupted run. --recipe NAME sets a paper's training settings; --trainer.* are the options of Lightning's Trainer.
Data with boxes or maps need a matching head: --data ade20k --model.head mask2former.

Classes named in a configuration are imported from torchrope, torch, torchvision and timm only; --allow adds packages,
as in --allow pytorch_lightning for Lightning's callbacks. A user-defined encoding is given as
--encoding mypackage.module:Class; if a file and not the command line names it, add --allow mypackage.
"""

EVALUATE = """\
Measure a trained model on its validation data and print a table: accuracy, also at other input sizes and with shuffled
patches; mIoU for semantic segmentation; AP for object detection. For a run, FOLDER/evaluation.json is written too.

The file of a published checkpoint, in a format that torchrope.load_published reads, needs --data (docs/data.md):

  torchrope evaluate deit_small.pth --data imagenet --data.root DIR --sizes 160,224,288 --crop-ratio 1.0

Its inputs are normalised as in the checkpoint's family, or as --data.normalise sets. At another size, images and videos
in files are read again, and other data are resampled from the training size, as the column "inputs" says.
"""

REPORT = """\
Rebuild OUT/report/index.html from the results of `torchrope compare` and `study` in OUT, or from a run of
`torchrope train`.
"""

_INSTALL = "(in a clone of torchrope: pip install . ./lab)"
RECIPES = "List the recipes for --recipe NAME of train, compare and study, or print one."

_OF_SEGMENTATION = ("crop", "scales", "flip")
_NOT_STORED = {
    "accelerator", "barebones", "benchmark", "detect_anomaly", "devices", "enable_autolog_hparams",
    "enable_checkpointing", "enable_model_summary", "enable_progress_bar", "limit_predict_batches",
    "limit_test_batches", "log_every_n_steps", "logger", "max_time", "model_registry", "num_nodes",
    "num_sanity_val_steps", "profiler", "strategy",
}  # fmt: skip
"""Options of Lightning's Trainer that do not change results, or that name devices."""
_LIMITS = ("trainer.max_steps", "trainer.max_time", "trainer.limit_train_batches")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `torchrope` and return the exit status."""
    # 0 for success, 2 for a user's mistake (printed in one line), 130 after Ctrl-C, 141 if the output pipe was closed,
    # as in `torchrope recipes | head`. A run that a signal stopped after it saved exits with 75 (SystemExit).
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        return 141


def _run(arguments: list[str]) -> int:
    """Run a command; print a user's mistake in one line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        print(f"torchrope {version('torchrope')}")
        return 0
    command, *rest = arguments
    if command not in _COMMANDS:
        return _fail("", f"commands are {', '.join(_COMMANDS)}, got {command!r}{nearest(command, _COMMANDS)}")
    try:
        return _COMMANDS[command](rest)
    except KeyboardInterrupt:
        print(f"\nstopped; to resume: torchrope {shlex.join(arguments)}", file=sys.stderr)
        return 130
    except IN_ONE_LINE as error:
        if isinstance(error, BrokenPipeError):
            print(flush=True)  # raises again if stdout is the broken pipe
        if "--debug" in rest:
            traceback.print_exc()
        missing = f"{error.name} is not installed {_INSTALL}" if isinstance(error, ModuleNotFoundError) else error
        return _fail(f" {command}", missing)


def _fail(command: str, error: object) -> int:
    """Print a mistake in one line."""
    print(f"torchrope{command}: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _add_dry_run(parser: Any) -> None:
    from torchrope_lab.settings.parser import ReadBefore

    listed = "List the runs, the estimated minutes and warnings; train and write nothing."
    parser.add_argument("--dry-run", action=ReadBefore, help=listed)


@interrupted_by_signals()
def _compare(arguments: list[str]) -> int:
    from torchrope_lab.settings.compare_config import CompareConfig

    parsed = parse("compare", COMPARE, CompareConfig, arguments, _add_dry_run)
    check_writable(Path(parsed.config.out))
    _find_encodings_of(parsed, "encodings")
    _warn_of_devices(parsed)
    from rich.console import Console

    from torchrope_lab.studies.compare import compare

    command, dry_run = shlex.join(["torchrope", "compare", *arguments]), "--dry-run" in arguments
    results = compare(parsed.config, command=command, console=Console(), allow=parsed.allow, dry_run=dry_run)
    return 0 if dry_run else _write_report(results.parent)


@interrupted_by_signals()
def _study(arguments: list[str]) -> int:
    if "--list" in arguments:
        return _list_studies()
    names, *options = _with_names_first(arguments)
    from torchrope_lab.engine.registry import check_supported, suitable
    from torchrope_lab.settings.run_config import changed, plain
    from torchrope_lab.settings.study_config import StudyConfig

    adding = [re.sub(r"^--checkpoint(?==|$)", "--checkpoint+", word) for word in options]  # every one adds to the list
    parsed = parse("study", STUDY, StudyConfig, adding, _add_dry_run, "NAME[,NAME] [options]")
    config = parsed.config
    check_writable(Path(config.out))
    _find_encodings_of(parsed, "encodings")
    _find_encodings_of(parsed, "reference")
    from rich.console import Console

    from torchrope_lab.engine.study import check_studies, find_study, run_study

    studies = {name: find_study(name) for name in (suitable(config.data.name) if names == "all" else names.split(","))}
    if names == "all" and (without := [name for name, study in studies.items() if not study.supports(config.data)]):
        print(f"left out, which do not support {parsed.name('data.folds')}: {', '.join(without)}")
        studies = {name: study for name, study in studies.items() if name not in without}
    usual = StudyConfig()
    for setting in ("reference", "checkpoint", "sizes", "probes"):
        if changes := changed({setting: plain(usual)[setting]}, {setting: plain(config)[setting]}):
            check_supported(list(studies.values()), setting, parsed.name(changes[0]))
    if not any(study.needs_data for study in studies.values()):
        supported = {setting for study in studies.values() for setting in study.optional_settings}
        unused = [setting for setting in ("data", "model", "optim", "seeds") if setting not in supported]
        _refuse(parsed, unused, f"a study that trains on data, got {names}")
    check_studies(list(studies.values()), config)
    if config.checkpoint:
        from torchrope_lab.encodings import load_modules
        from torchrope_lab.engine.trained_models import encodings_of_runs

        load_modules(encodings_of_runs(config.checkpoint), parsed.allow)
    for name, study in studies.items():
        command = shlex.join(["torchrope", "study", name, *options])
        run_study(study, config, command=command, console=Console(), dry_run="--dry-run" in options)
    return 0 if "--dry-run" in options else _write_report(Path(config.out))


def _list_studies() -> int:
    from torchrope_lab.engine.registry import STUDIES

    for name, study in STUDIES.items():
        print(f"{name}\n  {study.question}\n  {study.sources}")
    print("\ntorchrope study NAME [--data DATA] runs one; torchrope study --help prints the options")
    return 0


def _with_names_first(arguments: list[str]) -> list[str]:
    """Check that the names of studies come first; without names there is only --help."""
    from torchrope_lab.engine.registry import STUDIES

    if arguments and not arguments[0].startswith("-"):
        for name in arguments[0].split(","):
            if name not in (*STUDIES, "all") and ":" not in name:
                rule = f"studies are {', '.join(STUDIES)}, or mypackage.module:STUDY"
                raise Mistake(f"{rule}, got {name!r}{nearest(name, STUDIES)}")
        return arguments
    if {"-h", "--help"} & {*arguments}:
        return ["", *arguments]
    rule = f"the name of a study must come first: {', '.join(STUDIES)}, or all"
    raise Mistake(f"{rule}; got {shlex.join(arguments) or 'none'}")


def _parse_train(arguments: Sequence[str]) -> Parsed[Any]:
    from pytorch_lightning import Trainer

    from torchrope_lab.settings.run_config import RunConfig

    def add(parser: Any) -> None:
        parser.set_defaults({"run.logs": ["csv", "tensorboard"]})
        parser.add_argument("--out", type=str, default="torchrope-train", help="Output folder.")
        parser.add_class_arguments(Trainer, "trainer", instantiate=False, skip={*REPLACED})
        parser.groups["trainer"].title = "Options of Lightning's Trainer"

    return parse("train", TRAIN, RunConfig, arguments, add)


@interrupted_by_signals()
def _train(arguments: list[str]) -> int:
    parsed = _parse_train(arguments)
    check_writable(Path(parsed.options.out))
    _find_encodings_of(parsed, "encoding")
    _warn_of_devices(parsed)
    from pytorch_lightning.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

    from torchrope_lab.data.build import make_data
    from torchrope_lab.report.evaluation import evaluation_table
    from torchrope_lab.training.evaluate import evaluate
    from torchrope_lab.training.models import check_patches
    from torchrope_lab.training.progress import print_epochs
    from torchrope_lab.training.run import train
    from torchrope_lab.training.sizes import training_sizes

    stored = {name: value for name, value in parsed.config.trainer.items() if name not in _NOT_STORED}
    config, out = replace(parsed.config, trainer=stored), Path(parsed.options.out)
    data = make_data(config.data)
    check_patches(config.model, data)
    training_sizes(config.optim, config.model, data)  # raises for sizes that patches do not divide
    data.setup()
    trainer = {name: value for name, value in parsed.options.trainer.as_dict().items() if value is not None}
    shown = trainer.get("enable_progress_bar", True)
    if shown and sys.stdout.isatty():
        from pytorch_lightning.callbacks import RichProgressBar

        callbacks = trainer.get("callbacks", [])
        trainer["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), RichProgressBar()]
    trainer["enable_progress_bar"] = shown and sys.stdout.isatty()
    try:
        progress = print_epochs(config.optim.epochs) if shown else None
        module, history = train(config, data, out, on_epoch=progress, **trainer)
    except MisconfigurationException as error:
        raise Mistake(f"--trainer options must fit this machine, got: {error}") from error
    if not history.rows:
        limits = [parsed.given[name] for name in _LIMITS if name in parsed.given]
        limited = ", ".join(f"{each.name} {each.value}" for each in limits)
        raise Mistake(f"training must finish one epoch or more, got none with {limited or 'these options'}")
    if getattr(rank_zero_only, "rank", 0) == 0:
        if config.model.task == "classify":
            print(evaluation_table(evaluate(module.model, data).measures(), data.input_size))
        print(f"trained: {out}  (torchrope evaluate {out})")
    return 0


def _find_encodings_of(parsed: Parsed[Any], setting: str) -> None:
    """Check that the encodings of a setting exist; import modules of those typed on the command line, or in --allow."""
    from torchrope_lab.encodings import load_modules, resolve_encoding

    value, option = getattr(parsed.config, setting), parsed.name(setting)
    names = [value] if isinstance(value, str) else value or []
    load_modules(names, None if option.startswith("--") else parsed.allow)
    for name in names:
        try:
            resolve_encoding(name)
        except ValueError as error:
            raise Mistake(f"{option}: {error}") from None


def _warn_of_devices(parsed: Parsed[Any]) -> None:
    from torchrope_lab.training.devices import slow_without_gpu

    if warning := slow_without_gpu(parsed.config):
        print(warning, file=sys.stderr)


def _add_evaluate_options(parser: Any) -> None:
    folder = "output folder of `torchrope train`, a run's folder in OUT/runs, or the file of a published checkpoint"
    sizes = "input sizes in pixels per side; by default multiples of the training size from 0.5 to 2"
    crop_ratio = "side of the centre crop as a fraction of the shorter side, as in 0.875; or native: without resizing"
    window_size = "Swin's window at other sizes, in tokens per side, or 'grow' with the input; default: as trained"
    positions = "at other sizes keep the spacing of patches, or the range of positions, as ComRoPE's code does"
    scales = "segmentation at several scales: factors of the input size, as in 0.75,1,1.25"
    crop = "segmentation in sliding windows of N pixels"
    load = "an option of load_published that the file does not determine, as in input_size=224"
    out = "write the JSON to this file; by default FOLDER/evaluation.json for a run, none for a checkpoint file"
    add = parser.add_argument
    add("folder", type=Path, help=folder)
    add("--sizes", type=list[PositiveInt], metavar="A,B", help=sizes)
    add("--crop-ratio", type=CropRatio, metavar="R", help=crop_ratio)
    add("--window-size", type=PositiveInt | Literal["grow"], metavar="N", help=window_size)
    add("--positions", type=Literal["spacing", "range"], default="spacing", help=positions)
    add("--crop", type=PositiveInt, metavar="N", help=crop)
    add("--scales", type=list[PositiveFloat], metavar="A,B", help=scales)
    add("--flip", action="store_true", help="segmentation averaged with the mirrored image")
    add("--load", action="append", default=[], metavar="NAME=VALUE", help=load)
    add("--out", type=Path, metavar="FILE", help=out)
    add("--json", action="store_true", help="print JSON, as in FOLDER/evaluation.json")


def _evaluate(arguments: list[str]) -> int:
    from torchrope.files import write_whole
    from torchrope_lab.results import clean
    from torchrope_lab.settings.run_config import EvaluationConfig

    parsed = parse("evaluate", EVALUATE, EvaluationConfig, arguments, _add_evaluate_options, "folder [options]")
    options = parsed.options
    is_file = options.folder.is_file()
    data, measures = _evaluate_checkpoint(parsed) if is_file else _evaluate_run(parsed)
    text = json.dumps(clean(measures), indent=1)
    out = options.out or (None if is_file else options.folder / EVALUATION)
    if out is not None:
        write_whole(out, text + "\n")
    if options.json:
        print(text)
        return 0
    from torchrope_lab.report.evaluation import evaluation_table

    print(evaluation_table(measures, data.input_size))
    if out is not None:
        print(f"\nnumbers: {out.resolve()}")
    return 0


def _evaluate_run(parsed: Parsed[Any]) -> tuple[Any, dict[str, Any]]:
    """Measure a run; return its data and the measures."""
    from torchrope_lab.training.evaluate import keep_range
    from torchrope_lab.training.run import load

    options = parsed.options
    of_file = ("data", "recipe", "config", "load")
    _refuse(parsed, of_file, f"the file of a checkpoint, got the folder {options.folder}")
    config, data, module = load(options.folder, allow=parsed.allow, crop_ratio=options.crop_ratio)
    model, task = module.model, config.model.task
    if task != "segment":
        _refuse(parsed, _OF_SEGMENTATION, f"semantic segmentation, got a run with head {config.model.head}")
    if task == "classify":
        if options.positions == "range":
            keep_range(model)
        return data, _measured(parsed, model, data)
    of_classification = ("sizes", "window_size", "positions")
    _refuse(parsed, of_classification, f"classification, got a run with head {config.model.head}")
    from torchrope_lab.engine.dense_tasks import evaluate_dense

    augmentation = {name: value for name in _OF_SEGMENTATION if (value := getattr(options, name))}
    return data, {**evaluate_dense(model.eval(), task, data, **augmentation), **augmentation}


def _refuse(parsed: Parsed[Any], settings: Sequence[str], rule: str) -> None:
    """Raise ValueError if one of these options is given."""
    for setting in parsed.given:
        if setting.partition(".")[0] in settings:
            raise Mistake(f"{parsed.name(setting)} is for {rule}")


def _evaluate_checkpoint(parsed: Parsed[Any]) -> tuple[Any, dict[str, Any]]:
    """Measure a published checkpoint; return its data and the measures."""
    from torchrope_lab.training.published_checkpoint import load_checkpoint

    options, config = parsed.options, parsed.config.data
    _refuse(parsed, _OF_SEGMENTATION, "semantic segmentation, got the file of a classifier's checkpoint")
    given = [name.removeprefix("data.") for name in parsed.given if name.startswith("data.")]
    if not given:
        raise Mistake(f"evaluating the checkpoint {options.folder} requires --data NAME")
    if options.crop_ratio is not None:
        config = with_crop_ratio(config, options.crop_ratio)
    load_options = dict(map(_load_option, options.load))
    model, data = load_checkpoint(
        options.folder, config, given=given, options=load_options, ranged=options.positions == "range"
    )
    normalised = getattr(data.config, "normalise", None)
    return data, {**_measured(parsed, model, data), **({"normalise": normalised} if normalised else {})}


def _load_option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE of --load; a value is a JSON number, a list as A,B, or text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise Mistake(f"--load must be NAME=VALUE as in input_size=224, got {text!r}")
    values = as_list(value)
    return name, values[0] if len(values) == 1 else tuple(values)


def _measured(parsed: Parsed[Any], model: Any, data: Any) -> dict[str, Any]:
    """Measure a classifier; return the measures with the options given."""
    from torchrope_lab.settings.compare_config import SCALES
    from torchrope_lab.training.evaluate import evaluate, scaled_sizes, windows_at
    from torchrope_lab.training.sizes import size_of

    options = parsed.options
    try:
        windows_at(model, data.input_size, options.window_size)
        if not data.lattice:
            sizes = []
        elif options.sizes:
            sizes = sorted({size_of(side, data, model.embed.patch_size, "--sizes") for side in options.sizes})
        else:
            sizes = scaled_sizes(data, model.embed.patch_size, SCALES)
        if options.sizes and not data.lattice:
            raise Mistake(f"sizes is for data on a lattice, got {data.name}")
    except ValueError as error:
        raise Mistake(parsed.name_first(str(error))) from None
    given = {"crop_ratio": options.crop_ratio, "window_size": options.window_size}
    given |= {"positions": "range"} if options.positions == "range" else {}
    measures = evaluate(model, data, sizes, options.window_size).measures()
    return {**measures, **{name: value for name, value in given.items() if value is not None}}


def _report(arguments: list[str]) -> int:
    def add(parser: Any) -> None:
        export = "instead write every table to DIR, as CSV with all digits and as LaTeX"
        parser.add_argument("out", type=Path, nargs="?", default="torchrope-compare", help="folder of the results")
        parser.add_argument("--export", type=Path, metavar="DIR", help=export)

    options = parse("report", REPORT, NoneType, arguments, add, "[OUT] [options]").options
    from torchrope_lab.engine.run_table import write_run

    write_run(options.out)
    if options.export is not None:
        from torchrope_lab.report.export import export_tables

        files = export_tables(options.out, options.export)
        print(f"tables: {len(files) // 2}, as CSV and LaTeX in {options.export}")
        return 0
    return _write_report(options.out)


def _recipes(arguments: list[str]) -> int:
    def add(parser: Any) -> None:
        parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe, as YAML")

    name = parse("recipes", RECIPES, NoneType, arguments, add, "[NAME] [options]").options.name
    names = recipes.names()
    if name is not None:
        if name not in names:
            raise Mistake(f"NAME must be one that `torchrope recipes` lists, got {name!r}{nearest(name, names)}")
        from torchrope_lab.engine.published import cite, results_of

        recipe = recipes.find(name)
        results = [
            f"Published {measure}: {', '.join(f'{encoding} {value:g}' for encoding, value in values.items())}."
            for measure, values in results_of(recipe).items()
        ]
        print(recipe.text(cite(recipe.source), results), end="")
        return 0
    width = max(map(len, names))
    for each in names:
        print(f"{each:{width}}  {recipes.find(each).summary}")
    print("\ntorchrope recipes NAME prints one; train --recipe NAME and compare --recipe NAME use its settings")
    return 0


def _write_report(out: Path) -> int:
    """Print the results in a folder and write its report; return the exit status."""
    from torchrope_lab.report.chapters import terminal_text
    from torchrope_lab.report.read import read_studies

    studies = read_studies(out)
    for study in studies:
        print(terminal_text(study))
    try:
        from torchrope_lab.report.page import write_report

        page = write_report(out, studies)
    except ImportError as error:
        print(f"no page: {error.name} is not installed {_INSTALL}")
        return 0
    print(f"\nreport: {page.resolve()}")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "compare": _compare,
    "study": _study,
    "train": _train,
    "evaluate": _evaluate,
    "report": _report,
    "recipes": _recipes,
}
