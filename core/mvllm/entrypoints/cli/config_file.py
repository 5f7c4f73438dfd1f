"""`--config FILE`: options of a command in a YAML file.

The file's entries become command-line arguments, which are appended to the command line. So the file supports every
option, with the same checks. Options on the command line override the file.

    mvllm generate --config file.yaml --max-tokens 8

    model: demo                       --model=demo
    enable_prefix_caching: false  ->  --no-enable-prefix-caching
    stop: [END, "."]                  --stop=END --stop=.
    max-tokens: 64                    (given as a flag)
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mvllm.config.option_arguments import add_named_option
from mvllm.entrypoints.cli.argument_parser import find_subcommand
from mvllm.entrypoints.cli.option_spellings import ENGINE_OPTION
from mvllm.errors import ConfigError

FLAG = "--config"
_NOT_IN_A_FILE = {"config", "help", "help_about", "version"}


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`."""
    parser.add_argument(
        FLAG, metavar="FILE", help="YAML file with options of this command, without dashes; flags override it."
    )


def expand_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments, followed by those of the `--config` file if one is given.

    Args:
        parser: The parser of the whole command line.
        arguments: The whole command line.

    Raises:
        ConfigError: The file cannot be read, or an entry is invalid; the message names the file and the option.
    """
    command, rest = find_subcommand(parser, list(arguments))
    options = option_table(command)
    if "config" not in options:
        return list(arguments)
    path = _value_of(FLAG, rest)
    if path is None:
        return list(arguments)
    given = {argument.partition("=")[0] for argument in rest if argument.startswith("-")}
    extra: list[str] = []
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if name not in options and ENGINE_OPTION in command._option_string_actions and add_named_option(command, name):
            options = option_table(command)
        action = options.get(name)
        if action is None or name in _NOT_IN_A_FILE:
            raise ConfigError(_unknown(path, key, command.prog, options))
        if (
            value is None
            or given & set(action.option_strings)
            or (name == "model" and _has_positional_model(command, rest))
        ):
            continue
        try:
            extra += as_arguments(action, value)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as e:
            raise ConfigError(f"{path}: {key}: {e}") from e
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *extra, *arguments[end:]]


def option_table(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """A command's options by all their names, with `_` for `-`."""
    names: dict[str, argparse.Action] = {}
    for action in parser._actions:
        for text in action.option_strings:
            negative = isinstance(action, argparse.BooleanOptionalAction) and text.startswith("--no-")
            if text.startswith("--") and not negative:
                names[text.removeprefix("--").replace("-", "_")] = action
    return names


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The last value of an option; None if the option or its value is missing."""
    found = None
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
        elif argument == flag and i + 1 < len(arguments):
            found = arguments[i + 1]
    return found


def _has_positional_model(command: argparse.ArgumentParser, arguments: Sequence[str]) -> bool:
    """Whether the command line contains the positional argument MODEL."""
    if not any(action.dest == "model" and not action.option_strings for action in command._actions):
        return False
    previous = None
    options = {text: action for action in command._actions for text in action.option_strings}
    for argument in arguments:
        if argument.startswith("-"):
            action = options.get(argument)
            previous = action if action is not None and action.nargs != 0 else None
        elif previous is None:
            return True
        elif previous.nargs not in ("+", "*"):
            previous = None
    return False


def _read(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(f"The file {path!r} of {FLAG} cannot be read: {reason}.") from e
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ConfigError(f"The file {path!r} of {FLAG} is not YAML: {where}{getattr(e, 'problem', e)}.") from e
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"The file {path!r} of {FLAG} must hold lines `option: value`, such as `max-num-seqs: 64`.")
    return content


def _unknown(path: str, key: str, command: str, options: Mapping[str, argparse.Action]) -> str:
    known = [name for name in options if name not in _NOT_IN_A_FILE]
    nearest = next(iter(difflib.get_close_matches(key.replace("-", "_"), known, n=1)), None)
    suggestion = f"Did you mean {nearest.replace('_', '-')}?" if nearest else f"`{command} --help` lists the options."
    return f"{path}: {key} is not an option of `{command}`. {suggestion}"


def as_arguments(action: argparse.Action, value: Any) -> list[str]:
    """The command-line arguments for one entry of the file.

    Raises:
        ValueError, TypeError, ArgumentTypeError: The value is invalid for the option.
    """
    name = next(text for text in action.option_strings if text.startswith("--"))
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, found {value!r}.")
        negative = f"--no-{name.removeprefix('--')}"
        return [name] if value else [negative] if negative in action.option_strings else []
    if isinstance(action, argparse._AppendAction):
        return [f"{name}={_text(action, each)}" for each in (value if isinstance(value, list) else [value])]
    if action.nargs in ("+", "*"):
        words = [_text(action, each) for each in (value if isinstance(value, list) else [value])]
        if bad := [word for word in words if word.startswith("-")]:
            raise ValueError(f"{bad[0]!r} begins with a dash.")
        return [name, *words] if words else []
    return [f"{name}={_text(action, value)}"]


def _text(action: argparse.Action, value: Any) -> str:
    """One value as command-line text, checked as the option's type and choices require."""
    if isinstance(value, list | bool) or value is None:
        found = "a list" if isinstance(value, list) else "nothing" if value is None else str(value).lower()
        raise ValueError(f"must be one value, found {found}.")
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    convert = action.type if callable(action.type) else str
    try:
        converted = convert(text)
    except (ValueError, TypeError) as e:
        if isinstance(e, ConfigError):
            raise
        kind = {int: "an integer", float: "a number"}.get(convert) if isinstance(convert, type) else None
        raise ValueError(f"must be {kind}, found {value!r}." if kind else str(e)) from e
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"must be one of {', '.join(map(str, action.choices))}; found {value!r}.")
    return text
