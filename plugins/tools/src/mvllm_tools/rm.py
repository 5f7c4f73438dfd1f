"""`mvllm rm`: removes models from the cache of the hub."""

from __future__ import annotations

import argparse

from mvllm.extension_api.cli import remove_cached_model
from mvllm_tools.list import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="A model as `mvllm list` prints it.")


def run(args: argparse.Namespace) -> int:
    """Removes each model. Files outside of the cache are never removed."""
    for name in args.names:
        print(f"Removed {name}: {format_bytes(remove_cached_model(name))}.")
    return 0
