"""Parse the options of commands from command line, YAML files and recipes into dataclasses, with jsonargparse.

An error is one line that names an option as the user wrote it: `--epochs`, or `optim.epochs in mine.yaml`.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from torchrope_lab import recipes
from torchrope_lab.data.config import DATA_NAMES, SETTINGS, data_sets_with
from torchrope_lab.files import parse_yaml, read_mapping
from torchrope_lab.spelling import closest, suggestion
from torchrope_lab.training.config import flat

Config = TypeVar("Config")

_ALLOWED = ("torchrope", "torch", "torchvision", "timm")
_LOADERS = ("torch.load", "torch.hub", "torch.package", "torch.serialization", "torch.utils.cpp_extension")
_SHORT = {"--data": "data.name", "--epochs": "optim.epochs"}
_HELP = ("-h", "--help")
_PRINT = "--print_config"
_COMMON = re.compile(
    r"help|config|recipe|encodings?|seeds?|parallel|out|reference|checkpoint"
    r"|data(\.(root|labels|windows|problem|size|batch_size))?"
    r"|optim\.(epochs|lr)|scale\.precision|model\.(size|head|patch_size)|trainer\.devices"
)
"""Options that --help shows; `--help all` shows all."""
_BOUNDED = "bounded-yaml"
_SIZES = {f"model.{name}" for name in ("dim", "depth", "num_heads", "mlp_dim")}
_ONE = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "names"}


@dataclass(frozen=True)
class Given:
    """A setting that the user gave.

    Attributes:
        name: Name as it was written: "--epochs", "optim.epochs in mine.yaml".
        value: Value as it was written, text on the command line.
    """

    name: str
    value: Any

    @property
    def typed(self) -> bool:
        """Whether it was given on the command line and not in a file."""
        return self.name.startswith("--")


@dataclass(frozen=True)
class Parsed(Generic[Config]):
    """The options of a command.

    Attributes:
        config: The settings.
        others: Values of the extra options (`add` of `parse`), by name.
        given: Settings that the user gave, by full name, as "optim.epochs".
        allow: Modules and packages that --allow names.
    """

    config: Config
    others: Any
    given: dict[str, Given]
    allow: list[str]

    def name(self, setting: str) -> str:
        """Return a setting's name as the user wrote it."""
        return self.given[setting].name if setting in self.given else f"--{setting}"


def parse(
    command: str,
    description: str,
    config: type[Config],
    arguments: Sequence[str],
    add: Callable[[Any], None] | None = None,
) -> Parsed[Config]:
    """Parse the options of a command into a dataclass; defaults are those of the recipe, or of the data set.

    Args:
        command: Name of the command.
        description: Shown by --help [SECTION], which then exits, as --print_config does.
        config: The dataclass.
        arguments: The words after the command.
        add: Adds more options to the parser.

    Raises:
        ValueError: the command does not have an option or does not accept a value, in one line.
    """
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

    options, allow = take_allowed(arguments)
    set_parsing_settings(import_path_denylist=["*", *_LOADERS], import_path_allowlist=[*_ALLOWED, *allow])
    typed = _split(options)
    given = _given(typed, {name.partition(".")[0] for name in _values(config) if "." in name})
    recipe = _recipe(given)
    named = given["data.name"].value if "data.name" in given else None
    full = _with_data_type(config, named or recipe.get("data", {}).get("name"))

    parser = ArgumentParser(**_parser_settings(command, description))
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below")
    parser.add_argument("--recipe", type=str, default=None, help="settings by name, see torchrope recipes")
    parser.add_class_arguments(full)
    if add is not None:
        add(parser)
    _show_short_forms(parser)
    defaults = _defaults(recipe, {action.dest for action in parser._actions}, given)
    source = given["recipe"].value if "recipe" in given else named or "digits"
    everything = {name: Given(f"{name} in recipe {source}", value) for name, value in defaults.items()} | given
    _check(everything, parser)
    parser.set_defaults(defaults)
    for option, section in typed:
        if option in _HELP:
            _shorten_help(parser, command, section)
    values = _values(full)
    try:
        settings = parser.parse_args([_as_jsonargparse(option, value, values) for option, value in typed])
    except ArgumentError as error:
        raise ValueError(_explain(str(error), everything, values)) from None
    built = _build(full, settings, everything)
    return Parsed(
        config=config(**{f.name: getattr(built, f.name) for f in fields(config)}),  # type: ignore[arg-type]
        others=settings if add is None else parser.instantiate(settings),
        given=given,
        allow=allow,
    )


def take_allowed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those without --allow, and the modules and packages that it names.

    Configuration files cannot contain --allow.
    """
    only = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    only.add_argument("--allow", action="append", default=[])
    known, others = only.parse_known_args(arguments)
    return others, [name.strip() for names in known.allow for name in names.split(",") if name.strip()]


def merge_occurrences(arguments: Sequence[str], option: str) -> list[str]:
    """Merge the occurrences of an option that takes a list into one, with its values in order.

    Example:
        >>> merge_occurrences(["--checkpoint", "a", "--seeds=3", "--checkpoint=b,c"], "--checkpoint")
        ['--seeds=3', '--checkpoint=a,b,c']
    """
    pairs = _split(arguments)
    values = [value for name, value in pairs if name == option]
    if len(values) < 2 or None in values:
        return list(arguments)
    others = [name if value is None else f"{name}={value}" for name, value in pairs if name != option]
    return [*others, f"{option}={','.join(filter(None, values))}"]


def as_list(text: str) -> list[Any]:
    """Parse a list that is written with commas, numbers as numbers."""
    return [_as_number(part.strip()) for part in text.split(",") if part.strip()]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the name that is spelled most like a word, empty if none is similar."""
    names = list(known)
    plain = {name.lstrip("-"): name for name in names}
    setting = word.lstrip("-").replace("-", "_") if word.startswith("--") else word
    inner = [name for name in names if name.rpartition(".")[2] == setting]
    return suggestion(inner[0] if inner else plain.get(closest(setting, plain, cutoff=0.6) or ""))


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises a ValueError of one line for a mistake."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError that begins with the option as it was typed."""
        unknown = re.search(r"unrecognized arguments: (--[\w.\-]+)", message)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            raise ValueError(f"there is no option {unknown[1]}{nearest(unknown[1], options)}")
        option = re.match(r"argument (--[\w\-]+): (.*)", message)
        if not option:
            raise ValueError(f"{message}; {self.format_usage().strip()}")
        reason = option[2].replace("expected one argument", "needs a value, got none")
        reason = reason.replace("ignored explicit argument", "takes no value, got")
        raise ValueError(reason if reason.startswith(option[1]) else f"{option[1]} {reason}")


def checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type that calls a function and shows the messages of its ValueErrors."""

    def call(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return call


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts one of the given names."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"must be one of {', '.join(names)}, got {name!r}{nearest(name, names)}")
        return name

    return checked(check)


@checked
def at_least_one(text: str) -> int:
    """Parse a whole number of 1 or more (argparse type)."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"must be a whole number of 1 or more, got {text!r}")
    return int(text)


@checked
def factors(text: str) -> list[float]:
    """Parse factors as in 0.75,1,1.25 (argparse type)."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(value > 0 for value in values):
        raise ValueError(f"must be numbers above 0 as in 0.75,1,1.25, got {text!r}")
    return values


@checked
def whole_numbers(text: str) -> list[int]:
    """Parse whole numbers of 1 or more as in 144,192,224 (argparse type)."""
    values = [part.strip() for part in text.split(",")]
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise ValueError(f"must be whole numbers of 1 or more as in 144,192,224, got {text!r}")
    return [int(value) for value in values]


@checked
def unit_fraction(text: str) -> float:
    """Parse a number above 0 and at most 1 (argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1, got {text!r}")
    return value


@checked
def window_size(text: str) -> int | Literal["grow"]:
    """Parse a whole number of 1 or more, or "grow" (argparse type)."""
    if text == "grow":
        return "grow"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"must be a whole number of 1 or more, or grow, got {text!r}")
    return int(text)


def _split(arguments: Sequence[str]) -> list[tuple[str, str | None]]:
    """Pair options with their values, in order."""
    pairs: list[tuple[str, str | None]] = []
    words = list(arguments)
    while words:
        option, equals, value = words.pop(0).partition("=")
        if not option.startswith("-"):
            raise ValueError(f"options begin with --, got {option!r}")
        if equals:
            pairs.append((option, value))
        elif option != _PRINT and words and not words[0].startswith("--"):
            pairs.append((option, words.pop(0)))
        else:
            pairs.append((option, None))
    return pairs


def _full_name(option: str) -> str:
    return _SHORT.get(option, option.removeprefix("--").removesuffix("+"))  # --trainer.callbacks+ adds to a list


def _given(typed: Sequence[tuple[str, str | None]], groups: set[str]) -> dict[str, Given]:
    """Return the settings of the command line and its files by full name; the last one counts."""
    given: dict[str, Given] = {}
    for option, value in typed:
        if option in (*_HELP, _PRINT):
            continue
        name = _full_name(option)
        given[name] = Given(option, value)
        if value is None:
            continue
        if name == "config" or (name in groups and not value.lstrip().startswith("{")):
            above = "" if name == "config" else f"{name}."
            stored = flat(read_mapping(Path(value), option), above)
            given |= {key: Given(f"{key} in {value}", each) for key, each in stored.items()}
    of_data, listed = f"one of {', '.join(DATA_NAMES)}", "a name that `torchrope recipes` lists"
    for name, names, rule in (("data.name", DATA_NAMES, of_data), ("recipe", recipes.names(), listed)):
        each = given.get(name)
        if each is not None and each.value not in (None, *names):
            raise ValueError(f"{each.name} must be {rule}, got {each.value!r}{nearest(str(each.value), names)}")
    return given


def _recipe(given: dict[str, Given]) -> dict[str, Any]:
    """Return the settings of the recipe that is named, or of the data set's."""
    named = [given[name].value for name in ("recipe", "data.name") if name in given]
    return recipes.settings(next(filter(None, named), "digits"))


def _with_data_type(config: type, name: str | None) -> type:
    """Return the config dataclass with `data` of the type of a data set."""
    kind = SETTINGS[name or "digits"]
    fields_of_data = [("data", kind, field(default_factory=kind))]
    return make_dataclass(config.__name__, fields_of_data, bases=(config,), namespace={"__doc__": config.__doc__})


def _parser_settings(command: str, description: str) -> dict[str, Any]:
    from jsonargparse import DefaultHelpFormatter, set_loader
    from yaml import YAMLError

    set_loader(_BOUNDED, _load_bounded, (YAMLError, ValueError))

    class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Prints types and defaults with every option, and paragraphs unchanged."""

    return {
        "prog": f"torchrope {command}",
        "usage": f"torchrope {command} {'NAME[,NAME] ' if command == 'study' else ''}[options]",
        "description": description,
        "formatter_class": Formatter,
        "exit_on_error": False,
        "allow_abbrev": False,
        "parser_mode": _BOUNDED,
    }


def _show_short_forms(parser: argparse.ArgumentParser) -> None:
    """Show short forms in the help; `_as_jsonargparse` expands them before the parser runs."""
    for action in parser._actions:
        if action.dest == "data":
            action.metavar, action.help = "NAME", f"Data set: {', '.join(DATA_NAMES)}. Short for --data.name."
        elif action.dest == "optim.epochs":
            action.option_strings = ["--epochs", *action.option_strings]
        action.option_strings = [option for option in action.option_strings if not option.endswith("+")]


def _shorten_help(parser: argparse.ArgumentParser, command: str, section: str | None) -> None:
    """Hide options that a section of the help does not have: those of a group of settings, or by default the common."""
    groups = sorted({action.dest.partition(".")[0] for action in parser._actions if "." in action.dest})
    if section not in (None, "all", *groups):
        raise ValueError(f"--help takes all, {', '.join(groups)} or nothing, got {section!r}")
    for action in parser._actions:
        shown = _COMMON.fullmatch(action.dest) if section is None else f"{action.dest}.".startswith(f"{section}.")
        if section != "all" and not shown:
            action.help = argparse.SUPPRESS
    if section is None:
        parser.epilog = f"All options: torchrope {command} --help all; of one group: --help {', '.join(groups)}."


def _load_bounded(text: str) -> Any:
    """Parse YAML of files and values as jsonargparse does, and reject aliases that expand without bound."""
    from jsonargparse import get_loader

    return parse_yaml(text, get_loader("yaml"))


def _defaults(recipe: dict[str, Any], known: set[str], given: dict[str, Given]) -> dict[str, Any]:
    """Return the settings of a recipe that a command has, without its model sizes if the user gave model.size."""
    parts = {name.partition(".")[0] for name in known}
    settings = flat({name: value for name, value in recipe.items() if name in parts})
    sized = "model.size" in given and given["model.size"].value not in (None, "null")
    return {name: value for name, value in settings.items() if not (sized and name in _SIZES)}


def _values(config: type, above: str = "") -> dict[str, Any]:
    """Return the types of the settings of a dataclass, by full name."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(config).items():
        types |= _values(kind, f"{above}{name}.") if is_dataclass(kind) else {f"{above}{name}": kind}  # type: ignore[arg-type]
    return types


def _check(given: dict[str, Given], parser: argparse.ArgumentParser) -> None:
    """Raise ValueError for options that the command does not have, and for options without a value."""
    known = {action.dest for action in parser._actions}
    groups = {name.rpartition(".")[0] for name in known if not name.endswith(".help")}
    for name, each in given.items():
        above = [name.rsplit(".", count)[0] for count in range(1, name.count("."))]
        if name not in known and not any(part in known and part.startswith("trainer.") for part in above):
            raise ValueError(_unknown(name, given, parser))
        if each.value is None and each.typed:
            raise ValueError(f"{each.name} needs a value, got none")
        if name in groups and not each.typed:
            raise ValueError(f"{each.name} must hold named settings, got {each.value!r}")


def _unknown(name: str, given: dict[str, Given], parser: argparse.ArgumentParser) -> str:
    """Explain an unknown option: the data sets that have it, or the option that is spelled most like it."""
    each = given[name]
    whose = data_sets_with(name.removeprefix("data.")) if name.startswith("data.") else []
    if whose:
        data = next(action.default for action in parser._actions if action.dest == "data.name")
        return f"{each.name} is for {', '.join(whose)}, got --data {data}"
    if each.typed:
        options = [option for action in parser._actions for option in action.option_strings]
        return f"there is no option {each.name}{nearest(each.name, [*options, *_SHORT])}"
    return f"there is no setting {each.name}{nearest(name, [action.dest for action in parser._actions])}"


def _as_jsonargparse(option: str, value: str | None, values: dict[str, Any]) -> str:
    """Rewrite an option for jsonargparse: its full name, lists as JSON."""
    if option in _HELP or value is None:
        return option
    if option == _PRINT:
        return f"{option}={value}"
    name = _full_name(option)
    kind = values.get(name)
    if _is_list(kind) and value != "null" and not value.startswith("["):
        value = json.dumps(_names(value) if str in get_args(kind) else as_list(value))
    return f"--{name}{'+' if option.endswith('+') else ''}={value}"


def _names(text: str) -> list[str]:
    """Split a list of names; a name that is a number, as of a folder, remains text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_list(kind: Any) -> bool:
    return any(get_origin(part) in (list, tuple) for part in (kind, *get_args(kind)))


def _as_number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _explain(message: str, given: dict[str, Given], values: dict[str, Any]) -> str:
    """Rewrite an error of jsonargparse as rule and value, in one line."""
    found = re.search(r'Parser key "([\w.]+)":(.*)', message, re.DOTALL)
    if not found:
        return message
    each = given.get(found[1], Given(f"--{found[1]}", None))
    denied = re.search(r"Importing '([\w.]+)' is not allowed", message)
    if denied:
        return f"{each.name} imports from {', '.join(_ALLOWED)} only, unless --allow names more, got {denied[1]!r}"
    if found[1] not in values:
        return f"{each.name}: {found[2]}"
    kind = values[found[1]]
    wrong = as_list(each.value) if _is_list(kind) and isinstance(each.value, str) else [each.value]
    names = [name for name in _literals(kind) if isinstance(name, str)]
    near = next(filter(None, (nearest(str(word), names) for word in wrong if word not in names)), "")
    return f"{each.name} must be {_describe(kind)}, got {each.value!r}{near}"


def _describe(kind: Any) -> str:
    """Describe the values of a type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is list:
        return f"a list of {_SEVERAL.get(parts[0]) or ', '.join(map(str, _literals(kind))) or 'lists'}"
    if origin is tuple:
        return f"{len(parts)} {_SEVERAL[parts[0]]}"
    if parts:
        return " or ".join(_describe(part) for part in parts)
    return _ONE.get(kind, str(kind))


def _literals(kind: Any) -> list[Any]:
    """Return the names in a type such as `list[Literal["a", "b"]]`."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    return [name for part in get_args(kind) for name in _literals(part)]


def _build(kind: type, settings: Any, given: dict[str, Given], above: str = "") -> Any:
    """Build a dataclass from parsed settings; errors begin with the option's name."""
    hints = get_type_hints(kind)
    values = {
        f.name: _build(hints[f.name], settings[f.name], given, f"{above}{f.name}.")
        if is_dataclass(hints[f.name])
        else settings[f.name]
        for f in fields(kind)
    }
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(_with_option(str(error), above, _values(kind, above), given)) from None


def _with_option(message: str, above: str, known: Iterable[str], given: dict[str, Given]) -> str:
    """Replace the setting at the start of a message by the option as the user wrote it."""
    begins = re.match(r"(--)?([\w.]*\w)", message)
    if begins is None:
        return message
    setting = begins[2] if begins[1] else f"{above}{begins[2]}"
    if setting not in known:
        return message
    return (given[setting].name if setting in given else f"--{setting}") + message[begins.end() :]
