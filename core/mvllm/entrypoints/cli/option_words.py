"""Error messages in the words of the command line: `--max-model-len` for the engine's `max_model_len`.

    Pass max_model_len.                          Pass --max-model-len.
    name another folder with tokenizer='FOLDER'  name another folder with --tokenizer FOLDER
    temperature must be a number, found -1       --temperature must be a number, found -1

The engine raises errors in the words of Python, which is where most settings are read.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Mapping, Sequence

_VALUE = re.compile(r"""'(?P<quoted>[^'\s]*)'|(?P<plain>(?:True|False|None)\b|-?\d[\w.]*(?<!\.))""")

_SETTING = "\0"
"""Marks the options that stand for `name=`, which are no texts of the user."""


def option_names(parser: argparse.ArgumentParser, arguments: Sequence[str] = ()) -> dict[str, str]:
    """The option of each setting that a command has, by the setting's name.

    Args:
        parser: The parser of the command.
        arguments: The command line: of an option with several names, the one that was typed counts.
    """
    typed = {argument.partition("=")[0] for argument in arguments}
    names: dict[str, str] = {}
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--") and not flag.startswith("--no-")]
        if flags and action.help != argparse.SUPPRESS:
            names[action.dest] = next((flag for flag in flags if flag in typed), flags[0])
    return names


def engine_options() -> dict[str, str]:
    """The options of the engine's settings, for commands that do not have them: `mvllm doctor` names them, too."""
    from mvllm.config.engine_args import EngineArgs
    from mvllm.config.option_arguments import option_flags

    return {setting.name: option_flags(setting)[0] for setting in EngineArgs.options()}


def in_options(message: str, names: Mapping[str, str]) -> str:
    """A message with options in place of the names of settings.

    A name that is an ordinary word, such as `seed`, is replaced where it has a value (`seed=1`) or begins a line.

    Args:
        names: As of `option_names`.
    """
    for name, flag in sorted(names.items(), key=lambda item: -len(item[0])):
        if name not in message:
            continue
        message = re.sub(rf"(?<![\w./'\"=-]){re.escape(name)}=", f"{_SETTING}{flag}=", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w./'\"\-]){re.escape(name)}(?![\w/'\"=(]|\.\w)", flag, message)
        else:
            message = re.sub(rf"^{re.escape(name)}(?= (?:is|must|has|names)\b)", flag, message, flags=re.MULTILINE)
    message = re.sub(rf"{_SETTING}(--[\w-]+)=(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})", _as_json, message)
    return re.sub(rf"{_SETTING}(--[\w-]+)=(\S+)", _as_typed, message).replace(_SETTING, "")


def _as_json(match: re.Match[str]) -> str:
    """`--option={'key': True}` of Python as it is typed: `--option '{"key": true}'`."""
    flag, text = match.groups()
    try:
        return f"{flag} '{json.dumps(ast.literal_eval(text))}'"
    except (ValueError, SyntaxError):
        return f"{flag} {text}"


def _as_typed(match: re.Match[str]) -> str:
    """`--option=value` of Python as it is typed: `--tokenizer 'x'` without quotes, a switch without its value."""
    flag, rest = match.groups()
    value = _VALUE.match(rest)
    if value is None:
        return f"{flag} {rest}"
    end = rest[value.end() :]
    if value["plain"] == "True":
        return f"{flag}{end}"
    if value["plain"] == "False":
        return f"--no-{flag[2:]}{end}"
    return f"{flag} {value['quoted'] if value['plain'] is None else value['plain']}{end}"
