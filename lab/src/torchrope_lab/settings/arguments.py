"""What `options.parse` adds to jsonargparse: lists as a,b,c, short forms, sections of the help, messages."""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, get_args, get_origin

from torchrope_lab.data.sets import DATA_NAMES
from torchrope_lab.mistakes import Mistake
from torchrope_lab.schema import convert, without_rules
from torchrope_lab.spelling import closest, suggestion

SHORT = {"--data": "data.name", "--epochs": "optim.epochs", "--folds": "data.folds"}
_PRINT = "--print_config"
_COMMON = re.compile(
    r"encodings?|seeds?|parallel|out|reference|checkpoint"
    r"|data(\.(root|labels|windows|problem|size|batch_size|folds))?"
    r"|optim\.(epochs|lr)|model\.(size|head|patch_size)|trainer\.devices"
)
"""Settings that --help shows; `--help all` shows all."""


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
        self.help = "show this help and exit; all: with all options, or those of one group"

    def __call__(self, parser: Any, namespace: Any, section: Any, option: str | None = None) -> None:
        """Print the help without the options that a section does not have, and exit."""
        groups = sorted({action.dest.partition(".")[0] for action in parser._actions if "." in action.dest})
        if section not in (None, "all", *groups):
            raise Mistake(f"--help takes {', '.join(['all', *groups])} or nothing, got {section!r}")
        for action in parser._actions:
            if section is None:
                special = action.dest.partition(".")[0] in {*self.settings, *groups} or _PRINT in action.option_strings
                shown = not special or _COMMON.fullmatch(action.dest) is not None
            else:
                shown = section == "all" or f"{action.dest}.".startswith(f"{section}.")
            if not shown:
                action.help = argparse.SUPPRESS
            if hasattr(action, "_typehint"):
                action.type = None  # shows the type hint
        if section is None and groups:
            parser.epilog = f"All options: {parser.prog} --help all; of one group: --help {', '.join(groups)}."
        parser.print_help()
        parser.exit()


def accept_short_forms(parser: Any) -> dict[str, Any]:
    """Accept short forms, and lists as a,b,c except for Lightning's Trainer; return types with rules, by name."""
    # `schema.convert` checks rules, which jsonargparse does not know.
    kinds: dict[str, Any] = {}
    for action in parser._actions:
        action.option_strings = [option for option in action.option_strings if not option.endswith("+")]  # in the help
        short = [option for option, setting in SHORT.items() if setting == action.dest]
        parser._option_string_actions |= dict.fromkeys(short, action)
        if action.dest in ("optim.epochs", "data.folds"):
            action.option_strings = [*short, *action.option_strings]
        elif action.dest == "data":
            action.metavar = "NAME"
            action.help = f"{', '.join(DATA_NAMES)}, hf:NAME, webdataset:FOLDER, or mypackage.module:source."
        if not hasattr(action, "_typehint") or action.dest.startswith("trainer."):
            continue
        kinds[action.dest] = action._typehint
        action._typehint = kind = without_rules(action._typehint)
        if _is_list(kind):
            parser._option_string_actions[f"--{action.dest}+"] = action  # jsonargparse does not see lists with rules
            action.metavar = action.metavar or "[ITEM,...]"
            action.type = partial(_list_as_json, kind)
    return kinds


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
        return f"unrecognized arguments: {unknown[1]!r} (options begin with --); usage: {parser.usage}"
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
