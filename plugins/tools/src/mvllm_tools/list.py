"""`mvllm list`: the models in the local caches."""

from __future__ import annotations

import argparse
import time

from mvllm.extension_api.cli import list_cached_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command: none."""


def run(args: argparse.Namespace) -> int:
    """Prints one line per model: its name, as other commands take it, size, quantization and age."""
    rows = [("NAME", "SIZE", "QUANTIZATION", "MODIFIED")]
    for model in list_cached_models():
        rows.append((model.name, format_bytes(model.num_bytes), model.quantization, format_age(model.modified)))
    if len(rows) == 1:
        print("No model is cached. `mvllm pull NAME` fetches one; `mvllm run demo` needs none.")
        return 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def format_bytes(num_bytes: int) -> str:
    """`4.7 GB`: a size in powers of 1000."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_age(modified: float) -> str:
    """`3 hours ago`."""
    seconds = max(0.0, time.time() - modified)
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
