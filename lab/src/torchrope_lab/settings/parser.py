"""Parse the command line, YAML files and recipes of every command with jsonargparse, into typed dataclasses.

An error is one line that names a setting as the user wrote it: `--epochs`, or `optim.epochs in mine.yaml`.
"""

import argparse
import json
import operator
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from torchrope_lab import recipes
from torchrope_lab.data.data_config import DataConfig, data_sets_with, settings_of
from torchrope_lab.data.sets import DATA_NAMES
from torchrope_lab.files import read_mapping
from torchrope_lab.mistakes import Mistake, closest, suggestion
from torchrope_lab.modules import load_module
from torchrope_lab.schema import build, convert, without_rules
from torchrope_lab.settings.run_config import flat

SHORT = {"--data": "data.name", "--epochs": "optim.epochs", "--folds": "data.folds"}
_PRINT = "--print_config"
WIDTH = 120
"""Columns of the help."""
_COMMON = re.compile(
    r"encodings?|seeds?|parallel|out|reference|checkpoint|data\.(name|root|labels?|example|windows|size|batch_size|folds)"
    r"|optim\.(epochs|lr)|model\.(size|head|patch_size)|trainer\.devices"
)
"""Settings that --help shows, each in one line where it fits; `--help all` shows all."""


@dataclass(frozen=True)
class Given:
    """A setting that the user gave."""

    name: str  # as it was written: "--epochs", "optim.epochs in mine.yaml"
    value: Any  # as it was written, text on the command line

    @property
    def typed(self) -> bool:
        """Whether it was given on the command line and not in a file."""
        return self.name.startswith("--")


def setting_of(option: str) -> str:
    """Return the setting of an option, such as `optim.epochs` of `--epochs`."""
    return SHORT.get(option, option[2:].replace("-", "_"))


class ReadBefore(argparse._HelpAction):
    """An option that is read before the command line is parsed, and not a setting."""

    def __init__(self, *, nargs: int | None = 0, metavar: str | None = None, **settings: Any) -> None:
        super().__init__(**{**settings, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})
        self.nargs, self.metavar = nargs, metavar

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class ShowHelp(argparse._HelpAction):
    """--help [SECTION]: the common options; all, or those of one group, with a section."""

    def __init__(self, *, settings: type, **others: Any) -> None:
        super().__init__(**{**others, "dest": argparse.SUPPRESS})
        self.settings = {f.name for f in fields(settings)} if is_dataclass(settings) else set()
        self.nargs, self.metavar = "?", "SECTION"
        self.help = "Show this help and exit; all: with all options, or those of one group"

    def __call__(self, parser: Any, namespace: Any, section: Any, option: str | None = None) -> None:
        """Print the help without the options that a section does not have, and exit."""
        groups = _groups(parser)
        if section not in (None, "all", *groups):
            raise Mistake(f"--help takes {', '.join(['all', *groups])} or nothing, got {section!r}")
        typed = list(parser._option_string_actions.items())
        for action in parser._actions:
            positional = not action.option_strings
            forms = [option for option, named in typed if named is action and not option.endswith("+")]
            action.option_strings = sorted(forms, key=len)[: 1 if section is None else None]
            if not forms:  # positional, or only in files
                shown = positional
            elif section is None:
                special = action.dest.partition(".")[0] in {*self.settings, *groups} or _PRINT in forms
                shown = not special or _COMMON.fullmatch(action.dest) is not None
            else:
                shown = section == "all" or f"{action.dest}.".startswith(f"{section}.")
            if not shown:
                action.help = argparse.SUPPRESS
            if hasattr(action, "_typehint"):
                action.type = None  # shows the type hint
        if section is None:
            parser.formatter_class = _Short
            parser._optionals._group_actions = [action for action in parser._actions if action.option_strings]
            parser._action_groups = [parser._positionals, parser._optionals]
            if groups:
                parser.epilog = f"All options: {parser.prog} --help all; of one group: --help {', '.join(groups)}."
        parser.print_help()
        parser.exit()


class _Short(argparse.RawDescriptionHelpFormatter):
    """Prints the first sentence and the default of every option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=WIDTH)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").partition(". ")[0].rstrip(".")
        known = action.option_strings and action.default != argparse.SUPPRESS and action.default not in ([], None)
        return f"{text} ({_as_typed(action.default)})" if known and action.default is not False else text

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.dest.rpartition(".")[2].upper()


def _as_typed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _groups(parser: Any) -> list[str]:
    """Return the names of groups of settings."""
    return sorted({action.dest.partition(".")[0] for action in parser._actions if "." in action.dest})


def accept_short_forms(parser: Any) -> dict[str, Any]:
    """Accept short forms, and lists as a,b,c except for Lightning's Trainer; return types with rules, by name."""
    # `schema.convert` checks rules, which jsonargparse does not know.
    kinds: dict[str, Any] = {}
    for action in parser._actions:
        short = [option for option, setting in SHORT.items() if setting == action.dest]
        parser._option_string_actions |= dict.fromkeys(short, action)
        if action.dest == "data.name":
            action.metavar = "NAME"
            action.help = f"{', '.join(DATA_NAMES)}, hf:NAME, webdataset:FOLDER, or mypackage.module:source"
        if not hasattr(action, "_typehint"):
            continue
        if action.dest.startswith("trainer."):
            action._typehint = _whole_numbers_first(action._typehint)
            continue
        kinds[action.dest] = action._typehint
        action._typehint = kind = without_rules(action._typehint)
        if _is_list(kind):
            parser._option_string_actions[f"--{action.dest}+"] = action  # jsonargparse does not see lists with rules
            action.metavar = action.metavar or "A,B"
            action.type = partial(_list_as_json, kind)
    return kinds


def _whole_numbers_first(kind: Any) -> Any:
    """Return a union in which 1 is read as an int: `typing` may return an equal one that another module made."""
    parts = get_args(kind)
    return reduce(operator.or_, sorted(parts, key=lambda part: part is not int)) if {int, float} <= {*parts} else kind


def as_list(text: str, convert: Callable[[str], Any] = json.loads) -> list[Any]:
    """Split a list that is written with commas, and convert the parts that can be; the others remain text."""
    values: list[Any] = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            values.append(convert(part))
        except ValueError:
            values.append(part)
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the name that is spelled most like a word, empty if none is similar."""
    names = list(known)
    plain = {name.lstrip("-"): name for name in names}
    setting = word.lstrip("-").replace("-", "_") if word.startswith("--") else word
    inner = [name for name in names if name.rpartition(".")[2] == setting]
    return suggestion(inner[0] if inner else plain.get(closest(setting, plain, cutoff=0.6) or ""))


def explain(
    message: str, parser: Any, given: Mapping[str, Given], kinds: Mapping[str, Any], allowed: Sequence[str]
) -> str:
    """Rewrite an error of argparse or jsonargparse as rule and value, in one line."""
    if unknown := re.match(r"unrecognized arguments: (\S+)", message):
        rules = "options begin with --, lists are written as a,b"
        return f"unrecognized arguments: {unknown[1]!r} ({rules}); usage: {parser.usage}"
    if option := re.match(r"argument (-[\w.\-]+)\S*: (.*)", message):
        name = given.get(parser._option_string_actions[option[1]].dest, Given(option[1], None)).name
        reason = option[2].replace("expected one argument", "requires a value")
        return f"{name} {reason.replace('ignored explicit argument', 'takes no value, got')}"
    key = re.search(r'Parser key "([\w.]+)":(.*)', message, re.DOTALL)
    if not key:
        return f"{message}; usage: {parser.usage}"
    each = given.get(key[1], Given(f"--{key[1]}", None))
    if denied := re.search(r"Importing '([\w.]+)' is not allowed", message):
        return f"{each.name} imports from {', '.join(allowed)} only, unless --allow names more, got {denied[1]!r}"
    try:
        convert(kinds.get(key[1], Any), _value_of(each.value, kinds.get(key[1])), each.name)
    except ValueError as error:
        return str(error)
    return f"{each.name}: {key[2]}"


def _value_of(text: Any, kind: Any) -> Any:
    """Return the value that the text of an option stands for, text itself if nothing else."""
    if not isinstance(text, str):
        return text
    values = as_list(text)
    return values if _is_list(kind) else values[0] if len(values) == 1 else text


def _list_as_json(kind: Any, text: str) -> str:
    name = get_origin(kind) not in (list, tuple) and str in get_args(kind) and "," not in text
    if text == "null" or text.startswith("[") or name:
        return text
    numbers = any(issubclass(part, int | float) for part in _elements(kind) if isinstance(part, type))
    return json.dumps(as_list(text, json.loads if numbers else str))


def _elements(kind: Any) -> list[Any]:
    """Return the types of the elements of a list type, or of an optional one."""
    if get_origin(kind) in (list, tuple):
        return [*get_args(kind)]
    return [element for part in get_args(kind) for element in _elements(part)]


def _is_list(kind: Any) -> bool:
    return bool(_elements(kind))


Config = TypeVar("Config")

_ALLOWED = ("torchrope", "torch", "torchvision", "timm")
_LOADERS = ("torch.load", "torch.hub", "torch.package", "torch.serialization", "torch.utils.cpp_extension")
_NEGATIVE = re.compile(r"-[\d.]")
"""Values that begin with a minus sign, such as -1,0."""
REPLACED = {
    "max_epochs": "--epochs",
    "gradient_clip_val": "--optim.clip",
    "accumulate_grad_batches": "--optim.effective_batch",
    "precision": "--run.precision",
    "default_root_dir": "--out",
    **dict.fromkeys(("plugins", "reload_dataloaders_every_n_epochs", "use_distributed_sampler"), ""),
    **dict.fromkeys(("limit_val_batches", "check_val_every_n_epoch"), ""),  # every epoch validates on all examples
}
"""Options of Lightning's Trainer that a run determines, and the options to use instead."""
_SIZES = {f"model.{name}" for name in ("dim", "depth", "num_heads", "mlp_dim")}


@dataclass(frozen=True)
class Parsed(Generic[Config]):
    """The options of a command."""

    config: Config
    options: Any  # values of all; those that `add` of `parse` added are attributes
    given: dict[str, Given]  # by the user, by full name, as "optim.epochs"
    allow: list[str]  # modules and packages that --allow names

    def name(self, setting: str) -> str:
        """Return a setting's name as the user wrote it."""
        return _name(setting, self.given)

    def name_first(self, message: str) -> str:
        """Replace a setting at the start of a message by its name as the user wrote it."""
        return _with_option(message, self.given, self.given)


def parse(
    command: str,
    description: str,
    config: type[Config],
    arguments: Sequence[str],
    add: Callable[[Any], None] | None = None,
    usage: str = "[options]",
) -> Parsed[Config]:
    """Parse the options of a command; defaults are those of the recipe, or of the data set."""
    # `config` is the dataclass of its settings, `NoneType` for a command without; `add` adds more options to the
    # parser.
    from jsonargparse import ArgumentError, set_parsing_settings

    typed = list(_pairs(arguments))
    allowed = [value for option, value in typed if option == "--allow" and value]
    allow = [name for value in allowed for name in as_list(value, str)]
    modules = [name for name in allow if not name.endswith(".py")]  # jsonargparse imports no files
    set_parsing_settings(import_path_denylist=["*", *_LOADERS], import_path_allowlist=[*_ALLOWED, *modules])
    given = given_settings(arguments, config)
    data, named = (given[name].value if name in given else None for name in ("data.name", "recipe"))
    source = named or (data if data in recipes.names() else "digits")
    recipe = recipes.settings(source)
    parser = _parser(command, description, usage, config)
    if is_dataclass(config):
        name = str(data or recipe.get("data", {}).get("name", "digits"))
        data_settings = _data_settings(name, given.get("data.name", Given("--data", name)), allow)
        if named is None and data not in recipes.names():
            source = data_settings.recipe
            recipe = recipes.settings(source)
        _add_settings(parser, config, data_settings)
    if add is not None:
        add(parser)
    kinds = accept_short_forms(parser)
    only_in_files = {*_groups(parser), "data.augment", *getattr(config, "not_options", ())}
    parser._option_string_actions = {
        option: action for option, action in parser._option_string_actions.items() if action.dest not in only_in_files
    }
    defaults = _defaults(recipe, {action.dest for action in parser._actions}, given)
    everything = {name: Given(f"{name} in recipe {source}", value) for name, value in defaults.items()} | given
    _check(everything, parser, getattr(config, "not_options", ()))
    parser.set_defaults(defaults)
    try:
        options = parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise Mistake(explain(str(error), parser, everything, kinds, _ALLOWED)) from None
    for name in kinds.keys() - get_type_hints(config).keys() if is_dataclass(config) else kinds:
        if "." not in name and options[name] is not None:
            convert(kinds[name], options[name], _name(name, everything))
    settings = options.as_dict()
    if "trainer" in settings:
        chosen = settings["trainer"].items()
        settings["trainer"] = {k: v for k, v in chosen if v != parser.get_default(f"trainer.{k}")}
    try:
        built: Any = build(config, settings, "") if is_dataclass(config) else None
    except ValueError as error:
        raise Mistake(_with_option(str(error), everything, kinds)) from None
    return Parsed(built, parser.instantiate(options), given, allow)


def _parser(command: str, description: str, usage: str, config: type) -> Any:
    from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader
    from yaml import YAMLError

    class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):  # types, defaults; paragraphs as are
        def __init__(self, prog: str) -> None:
            super().__init__(prog, width=WIDTH)

        def _expand_help(self, action: argparse.Action) -> str:
            return super()._expand_help(action).replace("<class 'Path'>", "path")

    set_loader("same-yaml", get_loader("yaml"), (YAMLError, ValueError))  # by its name "yaml" it reads 1 as 1.0
    parser = ArgumentParser(
        prog=f"torchrope {command}",
        usage=f"torchrope {command} {usage}",
        description=description,
        formatter_class=Formatter,
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
        parser_mode="same-yaml",
    )
    parser._negative_number_matcher = _NEGATIVE
    parser.add_argument("-h", "--help", action=ShowHelp, settings=config)
    parser.add_argument("--debug", action=ReadBefore, help="Show the traceback of any error.")
    return parser


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Pair the options among arguments with the text that follows; argparse decides whether it is their value."""
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            yield option.removesuffix("+"), value if equals else None if following.startswith("--") else following


def given_settings(arguments: Sequence[str], config: type) -> dict[str, Given]:
    """Return the settings of the command line and its files by full name; the last one counts."""
    given: dict[str, Given] = {}
    for option, value in _pairs(arguments):
        name = setting_of(option)
        given[name] = Given(option, value)
        if name == "config" and value is not None and is_dataclass(config):
            stored = flat(read_mapping(Path(value), option))
            given |= {key: Given(f"{key} in {value}", each) for key, each in stored.items()}
    recipe, names = given.get("recipe"), recipes.names()
    if recipe is not None and recipe.value not in (None, *names):
        rule = f"{recipe.name} must be a name that `torchrope recipes` lists"
        raise Mistake(f"{rule}, got {recipe.value!r}{nearest(str(recipe.value), names)}")
    return given


def _data_settings(name: str, given: Given, allow: Sequence[str]) -> type[DataConfig]:
    """Return the settings class of a data set; the module of a user's source must be typed or allowed."""
    try:
        load_module(name, None if given.typed else allow)
        return settings_of(name)
    except ValueError as error:
        raise Mistake(str(error).replace("--data", given.name, 1)) from None


def _add_settings(parser: Any, config: type, data: type[DataConfig]) -> None:
    """Add the options of a dataclass, with those of a data set for its field `data`."""
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below.")
    parser.add_argument("--recipe", type=str, default=None, help="Settings by name, see torchrope recipes.")
    allowed = "Modules and packages from which classes, encodings and data that files name may be imported."
    parser.add_argument("--allow", action=ReadBefore, nargs=None, metavar="A,B", help=allowed)
    parser.add_class_arguments(data, "data")
    parser.groups["data"].title = f"Data: {parser.groups['data'].title}"
    parser.add_class_arguments(config, skip={"data", "trainer"})


def _defaults(recipe: dict[str, Any], known: set[str], given: dict[str, Given]) -> dict[str, Any]:
    """Return the settings of a recipe that a command has, without its model sizes if the user gave model.size."""
    parts = {name.partition(".")[0] for name in known}
    settings = flat({name: value for name, value in recipe.items() if name in parts})
    sized = "model.size" in given and given["model.size"].value not in (None, "null")
    return {name: value for name, value in settings.items() if not (sized and name in _SIZES)}


def _check(given: dict[str, Given], parser: Any, not_options: Sequence[str]) -> None:
    """Raise ValueError for options and settings that the command does not have."""
    options, settings = parser._option_string_actions, {action.dest for action in parser._actions}
    groups = {name.rpartition(".")[0] for name in settings if not name.endswith(".help")}
    for name, each in given.items():
        above = [name.rsplit(".", count)[0] for count in range(1, name.count("."))]
        known = each.name in options if each.typed else name in settings
        if each.typed and name in not_options:
            raise Mistake(f"{each.name} is not an option of {parser.prog}, but of torchrope train and study")
        if not known and not any(part in settings and part.startswith("trainer.") for part in above):
            raise Mistake(_unknown(name, given, parser))
        if name in groups and not each.typed:
            raise Mistake(f"{each.name} must hold named settings, got {each.value!r}")


def _unknown(name: str, given: dict[str, Given], parser: Any) -> str:
    """Explain an unknown option: the data sets that have it, or the option that is spelled most like it."""
    each = given[name]
    defaults = {action.dest: action.default for action in parser._actions}
    whose = data_sets_with(name.removeprefix("data.")) if name.startswith("data.") else []
    if whose and "data.name" in defaults:
        return f"{each.name} is for {', '.join(whose)}, got --data {defaults['data.name']}"
    if name.startswith("trainer.") and (part := name.split(".")[1]) in REPLACED:
        return f"there is no option {each.name}{f'; use {REPLACED[part]}' if REPLACED[part] else ''}"
    if each.typed:
        return f"there is no option {each.name}{nearest(each.name, parser._option_string_actions)}"
    return f"there is no setting {each.name}{nearest(name, defaults)}"


def _name(setting: str, given: dict[str, Given]) -> str:
    return given[setting].name if setting in given else f"--{setting}"


def _with_option(message: str, given: dict[str, Given], known: Container[str]) -> str:
    """Replace the setting at the start of a message by the name that the user wrote."""
    begins = re.match(r"(--)?([\w.]*\w)", message)
    if begins is None or not (begins[1] or begins[2] in known):
        return message
    return _name(begins[2], given) + message[begins.end() :]
