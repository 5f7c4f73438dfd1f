"""Options of commands that answer chat requests: chat template, tool call parser and reasoning parser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mvllm import plugin_groups
from mvllm.entrypoints.parsers.auto_detect import AUTO, NONE
from mvllm.entrypoints.parsers.registry import (
    canonical_reasoning_parser,
    reasoning_parser_names,
    tool_parser_names,
)
from mvllm.errors import ConfigError


def add_chat_template_argument(group: Any) -> None:
    """Adds `--chat-template` to a parser or an argument group."""
    group.add_argument("--chat-template", metavar="TEXT", help="A Jinja template, or a file that holds one.")


def add_parser_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds `--tool-call-parser` and `--reasoning-parser` to an argument group."""
    group.add_argument(
        "--tool-call-parser",
        type=_tool_parser,
        choices=(AUTO, NONE, *tool_parser_names()),
        default=AUTO,
        help="Format of the model's tool calls; with none, requests with tools are rejected. Default: auto, detected "
        "from the chat template if it is unambiguous.",
    )
    group.add_argument(
        "--reasoning-parser",
        type=_reasoning_parser,
        choices=(AUTO, NONE, *reasoning_parser_names()),
        default=AUTO,
        help="Format of the model's reasoning. Default: auto, detected from the chat template if it is unambiguous.",
    )


def _tool_parser(name: str) -> str:
    return _check_installed(name, tool_parser_names(), plugin_groups.TOOL_PARSERS)


def _reasoning_parser(name: str) -> str:
    if name in (AUTO, NONE):
        return name
    try:
        name = canonical_reasoning_parser(name)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    return _check_installed(name, reasoning_parser_names(), plugin_groups.REASONING_PARSERS)


def _check_installed(name: str, known: tuple[str, ...], group: plugin_groups.PluginGroup) -> str:
    """The name. An unknown one is left to the argument's `choices`, unless a package could have it."""
    if name not in (AUTO, NONE, *known) and (missing := plugin_groups.missing_part_of(group)):
        choices = ", ".join((AUTO, NONE, *known))
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {choices}).{missing}")
    return name


def load_chat_template(given: str | None) -> str | None:
    """The chat template that `--chat-template` gives: the text itself, or the content of the file that it names.

    Raises:
        ConfigError: The file cannot be read.
        ModelError: The template has a syntax error.
    """
    if given is None:
        return None
    try:
        template = given if "{" in given else Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise ConfigError(f"--chat-template: the file {given!r} cannot be read: {reason}.") from e
    from mvllm.engine.tokenizer.jinja_template import check_syntax

    check_syntax(template, "--chat-template" if template == given else f"--chat-template {given}")
    return template
