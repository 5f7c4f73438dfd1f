"""Options that other engines' servers have and `mvllm serve` does without; see `mvllm.config.foreign_keywords`."""

from __future__ import annotations

import argparse

from mvllm.config.foreign_keywords import server_keywords, translate
from mvllm.config.option_arguments import add_foreign_options

_OPPOSITES = {"disable_fastapi_docs": "docs", "disable_uvicorn_access_log": "access_log"}
"""Switches of other engines that turn one of ours off."""


def add_foreign_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to `mvllm serve`. None is in its help."""
    for name, own in _OPPOSITES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=own, action="store_false", help=argparse.SUPPRESS)
    add_foreign_options(parser, server_keywords())


def apply_foreign_server_options(args: argparse.Namespace) -> None:
    """Warns of the options that have no effect.

    Raises:
        ConfigError: An option is refused.
    """
    table = server_keywords()
    translate({name: value for name, value in vars(args).items() if name in table}, table, prefix="--")
