"""Command `mvllm stats FILE`: summarizes a file of the CSV stat logger in three lines."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from mvllm.extension_api import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("file", type=Path, help="What the stat logger 'csv' wrote.")


def run(args: argparse.Namespace) -> int:
    """Prints the totals."""
    try:
        with args.file.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        tokens = sum(int(row["new_tokens"]) for row in rows)
        most = max((int(row["running"]) for row in rows), default=0)
    except (OSError, KeyError, ValueError) as e:
        raise ConfigError(f"{args.file} is no file of the stat logger 'csv': {type(e).__name__}: {e}") from e
    print(f"steps           {len(rows)}\ntokens          {tokens}\nmost running    {most}")  # noqa: T201
    return 0
