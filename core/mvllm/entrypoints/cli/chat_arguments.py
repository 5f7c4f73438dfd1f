"""Options of commands that answer chat requests: chat template, tool call parser and reasoning parser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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
        choices=(AUTO, NONE, *tool_parser_names()),
        default=AUTO,
        help="Format of the model's tool calls; with none, requests with tools are rejected. Default: auto, detected "
        "from the chat template if it is unambiguous.",
    )
    group.add_argument(
        "--reasoning-parser",
        type=canonical_reasoning_parser,
        choices=(AUTO, NONE, *reasoning_parser_names()),
        default=AUTO,
        help="Format of the model's reasoning. Default: auto, detected from the chat template if it is unambiguous.",
    )


def load_chat_template(given: str | None) -> str | None:
    """The chat template that `--chat-template` gives: the text itself, or the content of the file that it names.

    Raises:
        ConfigError: The file cannot be read.
    """
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise ConfigError(f"The chat template {given!r} cannot be read: {e}") from e
