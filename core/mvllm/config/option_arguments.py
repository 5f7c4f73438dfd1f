"""Command-line arguments of settings: one argparse option per `Option`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mvllm.config.foreign_keywords import ForeignKeyword, engine_keywords, find_foreign
from mvllm.config.human_readable_int import human_readable_int
from mvllm.config.option import Option
from mvllm.errors import ConfigError


def option_flags(setting: Option) -> list[str]:
    """`--name` of a setting and of its aliases, with dashes."""
    return [f"--{name.replace('_', '-')}" for name in (setting.name, *setting.aliases)]


def option_help(setting: Option) -> str:
    """The setting's help and default, for argparse."""
    default = setting.default
    shown = default not in (None, "") and setting.name != "model"
    if isinstance(default, bool):
        default = "on" if default else "off"
    return setting.help.replace("%", "%%") + (f" Default: {default}." if shown else "")


def _value_type(setting: Option) -> Callable[[str], Any]:
    if setting.kind is not int:
        return setting.kind
    words = setting.words
    return (lambda text: text if text in words else human_readable_int(text, words)) if words else human_readable_int


def add_option(group: Any, setting: Option, default: Any = argparse.SUPPRESS) -> None:
    """Adds one setting to a parser or an argument group.

    Args:
        default: The value where the option is not given; by default the namespace then lacks it.
    """
    common: dict[str, Any] = {"dest": setting.name, "default": default, "help": option_help(setting)}
    flags = option_flags(setting)
    if setting.kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    elif setting.kind is dict:
        group.add_argument(*flags, type=json_object_or_pairs, metavar="JSON", **common)
    else:
        action = group.add_argument(
            *flags,
            type=_value_type(setting),
            choices=setting.choices or None,
            metavar=None if setting.choices else {int: "N", float: "X", str: "TEXT"}.get(setting.kind),
            **common,
        )
        action.hints = setting.hints


def add_foreign_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    table: Mapping[str, ForeignKeyword],
    *,
    except_for: Collection[str] = (),
) -> None:
    """Adds the keywords of other engines as hidden options, except those that the parser has already.

    Args:
        except_for: Keywords that are options of the command itself.
    """
    for name in table.keys() - set(except_for):
        if "*" not in name:
            _add_foreign_option(parser, name, table[name])


def add_named_option(parser: argparse.ArgumentParser, name: str) -> bool:
    """Adds the hidden option of a keyword that matches a pattern of the table; returns whether there is one."""
    keyword = find_foreign(name, engine_keywords())
    if keyword is None:
        return False
    _add_foreign_option(parser, name, keyword)
    return True


def _add_foreign_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, name: str, keyword: ForeignKeyword
) -> None:
    flag = f"--{name.replace('_', '-')}"
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if flag in parser._option_string_actions:
        return
    if keyword.kind == "flag":
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif keyword.kind == "list":
        parser.add_argument(flag, nargs="+", type=json_or_text, **common)
    else:
        parser.add_argument(flag, type=json_or_text, **common)


def json_object(text: str) -> dict[str, Any]:
    """The value of an option that takes a JSON object.

    Raises:
        ConfigError: The text is not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except ValueError as e:
        where = f" ({e.msg} at character {e.pos + 1})" if isinstance(e, json.JSONDecodeError) else ""
        raise ConfigError(f"{text!r} is not valid JSON{where}. Give an object, such as '{{\"key\": 1}}'.") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r} is not a JSON object. Give one, such as '{{\"key\": 1}}'.")
    return value


def json_object_or_pairs(text: str) -> dict[str, Any]:
    """A JSON object, or numbers by name: `image=2,audio=1`."""
    if _PAIRS.fullmatch(text):
        return {name.strip(): int(number) for name, number in (pair.split("=") for pair in text.split(","))}
    return json_object(text)


_PAIRS = re.compile(r"\s*\w+=\d{1,9}(\s*,\s*\w+=\d{1,9})*\s*")


def json_or_text(text: str) -> Any:
    """JSON as its value; another text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
