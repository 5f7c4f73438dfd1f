"""The `mvllm` logger hierarchy. Only the entry points configure it.

A line looks like `INFO 11-20 12:00:00 [scheduler.py:123] text`. `MVLLM_LOGGING_LEVEL` sets the level.
"""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`. A package `mvllm_x` logs below `mvllm`, as `mvllm.x`."""
    return logging.getLogger(f"mvllm.{name.removeprefix('mvllm_')}" if name.startswith("mvllm_") else name)


def log_level() -> str:
    """The level of the `mvllm` loggers, for child processes."""
    return logging.getLevelName(logging.getLogger("mvllm").getEffectiveLevel())


def configure_logging(level: str | None = None, *, default: str | None = None) -> None:
    """Sends the `mvllm` loggers to stderr, unless the embedding program has configured a handler.

    Args:
        level: A level name; None for `MVLLM_LOGGING_LEVEL`.
        default: The level without this variable; None for the level that is set already, or else `INFO`.
    """
    root = logging.getLogger("mvllm")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
        root.addHandler(handler)
        root.propagate = False
    wanted = level or os.environ.get("MVLLM_LOGGING_LEVEL") or default
    if not wanted and root.level != logging.NOTSET:
        return
    wanted = (wanted or "INFO").upper()
    known = logging.getLevelNamesMapping()
    root.setLevel(wanted if wanted in known else "INFO")
    if wanted not in known:
        root.warning("MVLLM_LOGGING_LEVEL is %r; it must be one of %s. INFO is used.", wanted, ", ".join(known))
