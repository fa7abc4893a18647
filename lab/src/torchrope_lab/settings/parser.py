"""Parse the command line, YAML files and recipes of every command with jsonargparse, into typed dataclasses.

An error is one line that names a setting as the user wrote it: `--epochs`, or `optim.epochs in mine.yaml`.
"""

import argparse
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from torchrope_lab import recipes
from torchrope_lab.data.data_config import DataConfig, data_sets_with, settings_of
from torchrope_lab.files import read_mapping
from torchrope_lab.mistakes import Mistake
from torchrope_lab.modules import load_module
from torchrope_lab.schema import build, convert
from torchrope_lab.settings.arguments import (
    Given,
    ReadBefore,
    ShowHelp,
    accept_short_forms,
    as_list,
    explain,
    nearest,
    setting_of,
)
from torchrope_lab.settings.run_config import flat

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
    defaults = _defaults(recipe, {action.dest for action in parser._actions}, given)
    everything = {name: Given(f"{name} in recipe {source}", value) for name, value in defaults.items()} | given
    _check(everything, parser)
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
        changed = {k: v for k, v in settings["trainer"].items() if v != parser.get_default(f"trainer.{k}")}
        settings["trainer"] = changed
    try:
        built: Any = build(config, settings, "") if is_dataclass(config) else None
    except ValueError as error:
        raise Mistake(_with_option(str(error), everything, kinds)) from None
    return Parsed(
        config=built,
        options=parser.instantiate(options),
        given=given,
        allow=allow,
    )


def _parser(command: str, description: str, usage: str, config: type) -> Any:
    from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader
    from yaml import YAMLError

    class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Prints types and defaults with every option, and paragraphs unchanged."""

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
    parser.add_argument("--debug", action=ReadBefore, help="show the traceback of any error")
    return parser


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Pair the options among arguments with the text that follows; argparse decides whether it is their value."""
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            yield option.removesuffix("+"), value if equals else None if following.startswith("--") else following


def given_settings(arguments: Sequence[str], config: type) -> dict[str, Given]:
    """Return the settings of the command line and its files by full name; the last one counts."""
    kinds = get_type_hints(config) if is_dataclass(config) else {}
    groups = [name for name, kind in kinds.items() if is_dataclass(kind)]
    given: dict[str, Given] = {}
    for option, value in _pairs(arguments):
        name = setting_of(option)
        given[name] = Given(option, value)
        if (
            value is not None
            and groups
            and (name == "config" or (name in groups and not value.lstrip().startswith("{")))
        ):
            above = "" if name == "config" else f"{name}."
            stored = flat(read_mapping(Path(value), option), above)
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
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below")
    parser.add_argument("--recipe", type=str, default=None, help="settings by name, see torchrope recipes")
    allowed = "modules and packages from which classes, encodings and data that files name may be imported"
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


def _check(given: dict[str, Given], parser: Any) -> None:
    """Raise ValueError for options and settings that the command does not have."""
    options, settings = parser._option_string_actions, {action.dest for action in parser._actions}
    groups = {name.rpartition(".")[0] for name in settings if not name.endswith(".help")}
    for name, each in given.items():
        above = [name.rsplit(".", count)[0] for count in range(1, name.count("."))]
        known = each.name in options if each.typed else name in settings
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
