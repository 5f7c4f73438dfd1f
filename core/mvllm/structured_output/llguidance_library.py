"""The grammar library: imported when the first request needs it, asked for by name if it is missing."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

from mvllm.errors import RequestError

NAME = "llguidance"
REQUIREMENT = "llguidance>=1.9,<2"
"""As in the distribution's dependencies."""


def check_available() -> None:
    """Returns if structured outputs can be had; imports nothing.

    Raises:
        RequestError: The library is not installed.
    """
    if not _is_installed():
        raise RequestError(
            f"structured_outputs needs the package {NAME}, which is not installed. Run: pip install '{REQUIREMENT}', "
            "and start the engine again.",
            parameter="structured_outputs",
        )


def load() -> Any:
    """The module.

    Raises:
        RequestError: It is not installed, or cannot be imported.
    """
    check_available()
    try:
        return importlib.import_module(NAME)
    except ImportError as e:
        raise RequestError(
            f"structured_outputs needs the package {NAME}, which cannot be imported: {e}. Run: pip install "
            f"--force-reinstall '{REQUIREMENT}', and start the engine again.",
            parameter="structured_outputs",
        ) from e


def limits(library: Any) -> Any:
    """What one token may cost; so a step stays short whatever the grammar is.

    Large patterns are not run against the whole vocabulary beforehand: most of it would be for nothing.
    """
    return library.LLParserLimits(
        precompute_large_lexemes=False,
        step_max_items=20_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec(NAME) is not None
