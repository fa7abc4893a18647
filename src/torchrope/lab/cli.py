"""The command line: argument parsing only. Heavy imports wait until a command needs them."""

import argparse
import difflib
import io
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from torchrope._version import __version__
from torchrope.files import parse_yaml, read_mapping, write_whole
from torchrope.lab import recipes

HELP = """\
usage: torchrope COMMAND [options]

Rotary position encodings for data with any number of axes, and the tool to choose among them.

commands:
  compare    train the same model once per encoding and report which one suits the data, and what it costs
  train      train one model
  submit     train or compare many times, as jobs of Slurm or here
  evaluate   measure a trained model
  study      repeat a study of the papers on data of your choice; --list names them
  report     write the page of the comparison, the studies and the benchmark in a folder anew
  recipes    list the settings that papers trained with, or print one
  bench      measure how fast every encoding is here, beside the reference and others' code

  torchrope COMMAND --help    explains a command
  torchrope --version         tells the version

start here:
  torchrope compare                                    handwritten digits, about four minutes on two CPU cores
  torchrope compare --data motion                      moving digits: time, height, width
  torchrope compare --data images --data.root DIR      your own images, a folder per class
  torchrope compare --data videos --data.root DIR      your own videos; volumes: DICOM or NIfTI (docs/data.md)
  torchrope study dense                                segmentation and detection, on scenes of handwritten digits
  torchrope compare --recipe liere-cifar100-vit-b      as a paper did; torchrope recipes lists them
"""

COMPARE = """\
Train the same vision transformer once per position encoding, on the same data, seeds and schedule, and write
OUT/report/index.html: which encoding suits the data, and what it costs.

Stopped or killed, the same command goes on where it was. Short forms: --data NAME for --data.name NAME,
--epochs N for --optim.epochs N, --encodings a,b,c. Defaults below are those of the data set named, or of --recipe.

Encodings: none, learned, sinusoidal, bias, axial, mixed, liere, comrope-ap, comrope-ld, string, golden, dinov3, mrope,
mrope-interleaved; a block size as liere:8, several kinds together as learned+mixed or bias+axial. One of your own is
mypackage.module:Class, imported where the command names it; where a file names it, --allow mypackage imports it.
"""

STUDY = """\
Repeat a study of the papers on data of your choice: torchrope study NAME, where NAME is one that --list names, several
as a,b,c, or all. Everything lands in OUT: runs, one JSON a study, and OUT/report/index.html over all studies in it.

Runs are shared: what one study has trained no other trains again. Stopped or killed, the same command goes on where it
was. Defaults below are those of the data set named, or of --recipe; encodings are the study's own unless named, one of
your own as mypackage.module:Class.
Data is digits unless named; of study dense, which segments and detects, it is scenes.
"""

TRAIN = """\
Train one model: torchrope train --data digits --encoding liere:8 --out runs/liere8. Stopped or killed, the same
command goes on where it was. --recipe NAME takes a paper's settings. --trainer.* are the options of Lightning's
Trainer. Data with boxes or maps have a head for them: --data scenes --model.head faster-rcnn.

A configuration is data: a class that it names may come from torchrope, torch, torchvision and timm alone, unless
--allow names its package too, as in --allow pytorch_lightning for Lightning's callbacks. An encoding of your own is
--encoding mypackage.module:Class, imported where the command names it; in a file it needs --allow mypackage.
"""

SUBMIT = """\
Submit `torchrope train` or `torchrope compare` to Slurm, once or as a sweep: one job array, each run in a folder of its
own below the command's --out. What jobs print is in OUT-jobs. A run whose time is up saves and goes into the queue
again.

  torchrope submit --slurm partition=gpu,time=1440,gpus_per_node=8,ntasks_per_node=8 \\
      --sweep encoding=mixed,liere:8 --sweep seed=0,1,2 -- train --data cifar100 --out runs/cifar
"""

BENCH = """\
Measure how fast rotations are built and applied here, forward and backward, and write OUT/bench.json and
OUT/report/index.html, which also shows the comparison and the studies that are in OUT.

First every encoding must agree with the float64 reference, values and gradients; otherwise the differences are told
and nothing is measured. Then come torchrope, its reference, the compiled reference, and others' code where it is
installed (timm, rotary-embedding-torch), in one process and in turn. Columns with the unit "×" say how many times as
fast as that implementation torchrope is.

Encodings: axial, mixed, liere:8, liere, comrope-ap, comrope-ld; a block size as liere:16; one of your own as
mypackage.module:Class.

Tokens stand on a lattice as nearly square as their number allows, with one in front where that helps: 65 are 8x8
and a class token.
"""

_ALLOWED = ("torchrope", "torch", "torchvision", "timm")
_LOADERS = ("torch.load", "torch.hub", "torch.package", "torch.serialization", "torch.utils.cpp_extension")
_TELL_DATA = ("--data", "--data.name", "--recipe", "--config")
_BOUNDED = "bounded-yaml"
_SHORT = {"--data": "--data.name", "--epochs": "--optim.epochs"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `torchrope`.

    Returns:
        The exit status: 0, 1 where `bench` found a wrong result, 2 for a user's mistake (told in one line), 130 where
        Ctrl-C stopped it, 141 where nobody reads its output any more, as in `torchrope recipes | head`.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 141


def _run(arguments: list[str]) -> int:
    """Run a command, and tell a user's mistake in one line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        print(f"torchrope {__version__}")
        return 0
    command, *rest = arguments
    if command not in _COMMANDS:
        return _fail(f"commands are {', '.join(_COMMANDS)}, got {command!r}{_nearest(command, _COMMANDS)}")
    try:
        return _COMMANDS[command](rest)
    except KeyboardInterrupt:
        again = "starts anew" if command == "bench" else "goes on where it was"
        print(f"\nstopped; the same command {again}: torchrope {shlex.join(arguments)}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            print(flush=True)  # raises it again, if it is of the output
        return _fail(_one_line(error), command)


def _compare(arguments: list[str]) -> int:
    from torchrope.lab.studies.config import CompareConfig

    options, allow = _take_allowed(arguments)
    config = _parse("compare", COMPARE, CompareConfig, options)
    runs = f"{len(config.encodings)} encodings x {config.seeds} seeds"
    print(f"comparing {runs} on {config.data.name}; everything goes to {config.out}", flush=True)  # before torch loads
    from rich.console import Console

    from torchrope.lab.studies.compare import compare

    console = Console()
    command = shlex.join(["torchrope", "compare", *arguments])
    results = compare(config, command=command, console=console, allow=allow)
    return _write_report(results.parent)


def _study(arguments: list[str]) -> int:
    if "--list" in arguments:
        return _list_studies()
    named, options = _leading_names(arguments)
    from torchrope.lab.encodings import load_modules
    from torchrope.lab.studies.engine.config import StudyConfig
    from torchrope.lab.studies.engine.names import OF_PLACES, suitable

    told = any(option.partition("=")[0] in _TELL_DATA for option in options)
    own = ["--data=scenes"] if named in OF_PLACES and not told else []
    given, allow = _take_allowed(options)
    config = _parse("study", STUDY, StudyConfig, [*own, *given])
    load_modules(config.encodings, allow)
    from rich.console import Console

    from torchrope.lab.studies.engine.study import run_study

    for name in suitable(config.data.name) if named == "all" else named.split(","):
        command = shlex.join(["torchrope", "study", name, *options])
        print(f"{name}:")
        run_study(name, config, command=command, console=Console())
    return _write_report(Path(config.out))


def _list_studies() -> int:
    from torchrope.lab.studies.engine.names import NAMES, summary

    width = max(map(len, NAMES))
    for name in NAMES:
        print(f"{name:{width}}  {summary(name)}")
    print("\ntorchrope study NAME [--data DATA] runs one; torchrope study --help has the options")
    return 0


def _leading_names(arguments: list[str]) -> tuple[str, list[str]]:
    """The studies named first, and the options behind."""
    from torchrope.lab.studies.engine.names import NAMES

    if arguments and not arguments[0].startswith("-"):
        for name in arguments[0].split(","):
            if name not in (*NAMES, "all"):
                raise ValueError(f"studies are {', '.join(NAMES)}, got {name!r}{_nearest(name, NAMES)}")
        return arguments[0], arguments[1:]
    if {"-h", "--help"} & {*arguments}:
        return "", arguments
    raise ValueError(f"name a study first: {', '.join(NAMES)}, or all; got {shlex.join(arguments) or 'none'}")


def _train(arguments: list[str]) -> int:
    from jsonargparse import ArgumentError, set_parsing_settings
    from pytorch_lightning.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

    from torchrope.lab.encodings import load_modules
    from torchrope.lab.training.config import RunConfig
    from torchrope.lab.training.lightning_cli import TrainCLI

    arguments, allow = _take_allowed(arguments)
    set_parsing_settings(import_path_denylist=["*", *_LOADERS], import_path_allowlist=[*_ALLOWED, *allow])
    full = _of_data(arguments, RunConfig)

    class OverRecipe(TrainCLI):
        """Parse as the other commands do."""

        settings_type = full

        def parse_arguments(self, parser: Any, args: Any) -> None:
            try:
                self.config = _parse_over_recipe(parser, args)
            except ArgumentError as error:
                raise ValueError(_explain(str(error), parser)) from None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own: on arguments given as a list, and on its use of jsonargparse
        cli = OverRecipe(
            args=_with_long_names(arguments, full),
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
            parser_kwargs=_parser_settings("train", TRAIN),
        )
    load_modules([cli.settings.encoding], allow)
    try:
        cli.fit()
    except MisconfigurationException as error:
        raise ValueError(f"--trainer options must fit this machine, got: {error}") from error
    if getattr(rank_zero_only, "rank", 0) == 0:
        print(f"trained: {cli.out}  (torchrope evaluate {cli.out})")
    return 0


def _evaluate(arguments: list[str]) -> int:
    parser = _OneLineParser(prog="torchrope evaluate", description="Measure a trained model.")
    parser.add_argument("folder", type=Path, help="what `torchrope train --out` or a run of a comparison left")
    parser.add_argument("--crop", type=_positive, metavar="N", help="name pixels in overlapping windows of N pixels")
    parser.add_argument("--scales", type=_factors, metavar="A,B", help="name pixels at several sizes, and average")
    parser.add_argument("--flip", action="store_true", help="name pixels of the mirrored image too, and average")
    parser.add_argument("--json", action="store_true", help="print JSON, as FOLDER/evaluation.json has it")
    parser.add_argument(
        "--allow", action="append", metavar="A,B", help="modules that its encoding may be imported from"
    )
    rest, allow = _take_allowed(arguments)
    options = parser.parse_args(rest)
    from torchrope.lab.training.run import load

    config, data, module = load(options.folder, allow=allow)
    asked = {name: value for name in ("crop", "scales", "flip") if (value := getattr(options, name))}
    if asked and config.model.task != "segment":
        raise ValueError(f"--{min(asked)} is for a head that names pixels, got a run with head {config.model.head}")
    if config.model.task == "classify":
        from torchrope.lab.statistics import accuracy_interval
        from torchrope.lab.studies.config import SCALES
        from torchrope.lab.training.evaluate import evaluate

        evaluation = evaluate(module.model, data, SCALES)
        measures = {**evaluation.measures(), "interval": list(accuracy_interval(evaluation.correct)[1:])}
    else:
        from torchrope.lab.studies.engine.dense_tasks import evaluate_dense

        measures = {**evaluate_dense(module.model.eval(), config.model.task, data, **asked), **asked}
    text = json.dumps(measures, indent=1)
    write_whole(options.folder / "evaluation.json", text + "\n")
    if options.json:
        print(text)
        return 0
    from torchrope.lab.report.evaluation import evaluation_table

    print(f"{evaluation_table(measures, data.input_size)}\n\nnumbers: {(options.folder / 'evaluation.json').resolve()}")
    return 0


def _report(arguments: list[str]) -> int:
    parser = _OneLineParser(
        prog="torchrope report",
        description="Write the page of the comparison, the studies and the benchmark in a folder anew.",
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("torchrope-compare"), help="its folder")
    parser.add_argument("--readme", type=Path, help="also write the table between the markers of this file")
    options = parser.parse_args(arguments)
    if options.readme is not None:
        from torchrope.lab.report.readme import write_readme

        write_readme(options.readme, options.out / "results.json")
    return _write_report(options.out)


def _submit(arguments: list[str]) -> int:
    from torchrope.lab.studies.slurm import parse_slurm
    from torchrope.lab.studies.sweep import parse_sweep, run_here, submit_to_slurm, sweep

    parser = _OneLineParser(
        prog="torchrope submit",
        usage="torchrope submit [options] -- train|compare [its options]",
        description=SUBMIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--sweep", action="append", default=[], metavar="NAME=A,B", help="an option's values")
    parser.add_argument("--slurm", action="append", default=[], metavar="NAME=VALUE,...", help="options of sbatch")
    parser.add_argument("--cluster", type=_one_of(("slurm", "local")), default="slurm", help="local: on this machine")
    parser.add_argument("--parallel", type=_positive, metavar="N", help="runs at a time (default: Slurm's; local: 1)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    mine, _, command = _split(arguments, "--")
    options = parser.parse_args(mine)
    slurm = {name: value for text in options.slurm for name, value in parse_slurm(text).items()}
    jobs = sweep(command, [parse_sweep(text) for text in options.sweep])
    for job in jobs:
        _check(job.arguments)
    if options.dry_run:
        print(*(shlex.join(["torchrope", *job.arguments]) for job in jobs), sep="\n")
        return 0
    above = jobs[0].out.parent if options.sweep else jobs[0].out
    logs = above.with_name(f"{above.name}-jobs")
    if options.cluster == "local":
        failed = run_here(jobs, run_submitted, logs, options.parallel or 1, print)
        return 1 if failed else 0
    for number, job in zip(submit_to_slurm(jobs, run_submitted, logs, slurm, options.parallel), jobs, strict=True):
        print(f"{number}: {job.out}")
    print(f"output: {logs}")
    return 0


def run_submitted(arguments: list[str]) -> None:
    """Run `torchrope` as a job, which fails where the command does."""
    status = main(arguments)
    if status:
        raise RuntimeError(f"torchrope {shlex.join(arguments)} ended with status {status}")


def _check(arguments: list[str]) -> None:
    """Parse a command of a sweep, so that a mistake is told before it waits in a queue."""
    try:
        with redirect_stdout(io.StringIO()):
            _COMMANDS[arguments[0]]([*arguments[1:], "--print_config"])
    except SystemExit:
        pass  # it printed


def _split(words: list[str], at: str) -> tuple[list[str], list[str], list[str]]:
    """What is before a word, the word, and what is behind it."""
    place = words.index(at) if at in words else len(words)
    return words[:place], words[place : place + 1], words[place + 1 :]


def _recipes(arguments: list[str]) -> int:
    parser = _OneLineParser(prog="torchrope recipes", description="List the recipes, or print one.")
    parser.add_argument("name", nargs="?", type=str, help="the recipe to print")
    name = parser.parse_args(arguments).name
    if name is not None:
        print(recipes.find(_known_recipe(name)).read_text(encoding="utf-8"), end="")
        return 0
    names = recipes.names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {recipes.summary(name)}")
    print("\ntorchrope recipes NAME prints one; train --recipe NAME and compare --recipe NAME take its settings")
    return 0


def _bench(arguments: list[str]) -> int:
    from torchrope.lab.bench.config import Setting, parse_shape

    options = _bench_parser().parse_args(arguments)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder, got the file {options.out}")
    shape = {} if options.shape is None else parse_shape(options.shape)
    setting = Setting(**shape, axes=options.axes, dtype=options.dtype, device=options.device)
    encodings = None if options.encodings is None else json.loads(_encodings(options.encodings))
    from torchrope.lab.bench.bench import run_bench
    from torchrope.lab.bench.findings import bench_result
    from torchrope.lab.bench.parity import ParityError

    try:
        bench = run_bench(
            setting,
            encodings=encodings,
            rounds=options.rounds,
            num_threads=options.threads,
            command=shlex.join(["torchrope", "bench", *arguments]),
        )
    except ParityError as error:
        print(f"torchrope bench: no numbers, {error}:", *error.failures, sep="\n", file=sys.stderr)
        return 1
    bench_result(bench).write(options.out / "bench.json")
    return _write_report(options.out)


def _bench_parser() -> argparse.ArgumentParser:
    from torchrope.lab.bench.config import DEVICES, DTYPES

    parser = _OneLineParser(
        prog="torchrope bench",
        usage="torchrope bench [options]",
        description=BENCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", type=_one_of(DEVICES), default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--shape", metavar="BATCH,HEADS,TOKENS,HEAD_DIM", help="of q and k (default: 8,12,65,64)")
    parser.add_argument("--axes", type=int, default=2, metavar="N", help="length of a position (default: 2)")
    parser.add_argument(
        "--dtype", type=_one_of(DTYPES), default="float32", help=f"{', '.join(DTYPES)} (default: float32)"
    )
    parser.add_argument("--encodings", metavar="A,B,C", help="by name (default: those above that fit the shape)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads on the CPU (default: torch's own number)")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="medians are over so many (default: 21)")
    parser.add_argument("--out", type=Path, default=Path("torchrope-bench"), help="folder (default: torchrope-bench)")
    return parser


def _write_report(out: Path) -> int:
    from torchrope.lab.report.chapters import terminal_text
    from torchrope.lab.report.read import read_studies

    for study in read_studies(out):
        print(terminal_text(study))
    try:
        from torchrope.lab.report.page import write_report

        page = write_report(out)
    except ImportError as error:
        print(f"no page: {error.name} is not installed (pip install 'torchrope[lab]')")
        return 0
    print(f"\nreport: {page.resolve()}")
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "compare": _compare,
    "study": _study,
    "train": _train,
    "submit": _submit,
    "evaluate": _evaluate,
    "report": _report,
    "recipes": _recipes,
    "bench": _bench,
}


class _OneLineParser(argparse.ArgumentParser):
    """Tells mistakes as ValueErrors of one line."""

    def error(self, message: str) -> NoReturn:
        if "unrecognized arguments: --" in message:
            raise ValueError(_explain(message, self))
        raise ValueError(f"{message}; {self.format_usage().strip()}")


def _parse(command: str, description: str, config: type, arguments: list[str]) -> Any:
    """Parse into a dataclass; a mistake becomes a ValueError of one line."""
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(**_parser_settings(command, description))
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below")
    parser.add_argument("--recipe", type=str, default=None, help="settings by name, see torchrope recipes")
    full = _of_data(arguments, config)
    parser.add_class_arguments(full)
    try:
        given = parser.instantiate(_parse_over_recipe(parser, _with_long_names(arguments, full)))
    except ArgumentError as error:
        raise ValueError(_explain(str(error), parser)) from None
    return config(**{field.name: given[field.name] for field in fields(config)})


def _of_data(arguments: list[str], config: type) -> type:
    """The configuration with the settings of the data set that the arguments name, or a file or a recipe in them."""
    from torchrope.lab.data.config import settings_of

    name = recipe = None
    for option, value in pairwise(word for argument in arguments for word in argument.split("=", 1)):
        if option in ("--data", "--data.name"):
            name = value
        elif option == "--recipe":
            recipe = value
        elif option == "--config":
            stored = read_mapping(Path(value), "--config")
            recipe = stored.get("recipe", recipe)
            name = stored["data"].get("name", name) if isinstance(stored.get("data"), dict) else name
    if name is None and recipe is not None:
        name = recipes.settings(_known_recipe(recipe)).get("data", {}).get("name")
    kind = settings_of(name or "digits")
    fields_of_data = [("data", kind, field(default_factory=kind))]
    return make_dataclass(config.__name__, fields_of_data, bases=(config,), namespace={"__doc__": config.__doc__})


def _parse_over_recipe(parser: Any, options: list[str]) -> Any:
    """Parse with the named recipe, or the data set's, for defaults; a size by name puts the recipe's own size aside."""
    from torchrope.lab.training.config import flat

    asking = ("-h", "--help", "--print_config")
    given = parser.parse_args([option for option in options if option.partition("=")[0] not in asking])
    known = {action.dest for action in parser._actions}
    parts = {name.partition(".")[0] for name in known}
    recipe = recipes.settings(given.recipe or given.data.name)
    defaults = flat({name: value for name, value in recipe.items() if name in parts})
    for name in sorted(defaults.keys() - known):
        raise ValueError(_unknown(name, parser))
    parser.set_defaults(defaults)
    settings = parser.parse_args(options)
    if given.model.size is not None:
        for name in ("dim", "depth", "num_heads", "mlp_dim"):
            settings.model[name] = given.model[name]
    return settings


def _parser_settings(command: str, description: str) -> dict[str, Any]:
    from jsonargparse import DefaultHelpFormatter, set_loader
    from yaml import YAMLError

    set_loader(_BOUNDED, _load_bounded, (YAMLError, ValueError))

    class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Types and defaults with every option, paragraphs as they are written."""

    return {
        "prog": f"torchrope {command}",
        "usage": f"torchrope {command} {'NAME[,NAME] ' if command == 'study' else ''}[options]",
        "description": description,
        "formatter_class": Formatter,
        "exit_on_error": False,
        "parser_mode": _BOUNDED,
    }


def _load_bounded(text: str) -> Any:
    """YAML as jsonargparse reads it, from files of any option and from values, without what grows by aliases."""
    from jsonargparse import get_loader

    return parse_yaml(text, get_loader("yaml"))


def _take_allowed(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without --allow, and the modules and packages that it names."""
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--allow", action="append", default=[])
    known, others = only.parse_known_args(arguments)
    return others, [name.strip() for names in known.allow for name in names.split(",") if name.strip()]


def _with_long_names(arguments: list[str], config: type) -> list[str]:
    """Write short forms out (--data NAME, --epochs N, lists as a,b,c) and look at names and files they give."""
    looked_at = {**dict.fromkeys(_lists(config), _as_list), **_LOOKED_AT}
    long: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if long and long[-1] in looked_at:
            argument = looked_at[long[-1]](argument)
        elif name in _SHORT or (name in looked_at and equals):
            name = _SHORT.get(name, name)
            argument = f"{name}={looked_at.get(name, str)(value)}" if equals else name
        long.append(argument)
    return long


def _lists(config: type, above: str = "--") -> list[str]:
    """The options of a configuration whose values are lists."""
    found: list[str] = []
    for name, kind in get_type_hints(config).items():
        kinds = [get_origin(part) for part in (kind, *get_args(kind))]
        if is_dataclass(kind):
            found += _lists(kind, f"{above}{name}.")  # type: ignore[arg-type]
        elif list in kinds or tuple in kinds:
            found.append(f"{above}{name}")
    return found


def _as_list(text: str) -> str:
    """A list as JSON has it; what is one, or nothing, stays."""
    if text.startswith("[") or text == "null":
        return text
    return json.dumps([_as_number(part.strip()) for part in text.split(",") if part.strip()])


def _as_number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _encoding(name: str) -> str:
    """An encoding that was typed: what is of a module of one's own is imported, and looked at."""
    from torchrope.lab.encodings import load_modules, own_parts

    load_modules([name])
    if own_parts(name):
        from torchrope.lab.encodings import choose

        choose(name)
    return name


def _encodings(text: str) -> str:
    """Several of them, as a list."""
    names = _as_list(text)
    for name in json.loads(names) or []:
        _encoding(str(name))
    return names


def _known_data(name: str) -> str:
    from torchrope.lab.data.config import settings_of

    settings_of(name)
    return name


def _known_recipe(name: str) -> str:
    names = recipes.names()
    if name not in names:
        raise ValueError(f"there is no recipe {name!r}, torchrope recipes lists them{_nearest(name, names)}")
    return name


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    """What argparse calls to check a name."""

    def check(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {name!r}{_nearest(name, names)}")
        return name

    return check


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return int(text)


def _factors(text: str) -> list[float]:
    """Factors as 0.75,1,1.25."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers as 0.75,1,1.25, got {text!r}") from None


def _readable_config(path: str) -> str:
    read_mapping(Path(path), "--config")
    return path


_LOOKED_AT: dict[str, Callable[[str], str]] = {
    "--data.name": _known_data,
    "--encoding": _encoding,
    "--encodings": _encodings,
    "--config": _readable_config,
    "--recipe": _known_recipe,
}


def _explain(message: str, parser: argparse.ArgumentParser) -> str:
    """Shorten what the parser says to one line, and suggest the nearest option for a typo."""
    unknown = re.search(r"[Uu]nrecognized arguments: --([\w.\-]+)", message)
    if unknown:
        return _unknown(unknown[1], parser)
    in_file = re.search(r"Group '([\w.]+)' does not accept option '([\w.\-]+)'", message)
    if in_file:
        return _unknown(f"{in_file[1]}.{in_file[2]}", parser)
    elsewhere = re.search(r"Option '([\w.\-]+)' is not accepted", message)
    if elsewhere:
        return _unknown(elsewhere[1], parser)
    wrong_type = re.search(r'^Parser key "([\w.]+)":\s+(?!Unable to load)(.*)', message, re.DOTALL)
    if wrong_type:
        return f"--{wrong_type[1]}: {_one_line(wrong_type[2])}"
    denied = re.search(r"Importing '([\w.]+)' is not allowed", message)
    if denied:
        return f"a configuration imports from {', '.join(_ALLOWED)} alone, unless --allow names more, got {denied[1]!r}"
    return _one_line(message)


def _unknown(name: str, parser: argparse.ArgumentParser) -> str:
    """Say of an option that there is not whose it is, or which one is spelled like it."""
    from torchrope.lab.data.config import refusal, takers

    setting = name.removeprefix("data.")
    if setting != name and takers(setting):
        data = next(action.default for action in parser._actions if action.dest == "data.name")
        return str(refusal(setting, data))
    options = [option for action in parser._actions for option in action.option_strings]
    return f"there is no option --{name}{_nearest(f'--{name}', options)}"


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _fail(message: str, command: str | None = None) -> int:
    print(f"torchrope{' ' + command if command else ''}: {message}", file=sys.stderr)
    return 2
