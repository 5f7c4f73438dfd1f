"""The llguidance library, imported when the first request needs it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

from mvllm.errors import RequestError
from mvllm.installation import install_command

NAME = "llguidance"
REQUIREMENT = "llguidance>=1.9,<2"
"""The same as in the distribution's dependencies."""


def check_available() -> None:
    """Checks that structured outputs are supported; imports nothing.

    Raises:
        RequestError: The library is not installed.
    """
    if not _is_installed():
        raise RequestError(
            f"structured_outputs needs the package {NAME}, which is not installed. "
            f"Run: {install_command(REQUIREMENT)}, and start the engine again.",
            parameter="structured_outputs",
        )


def load() -> Any:
    """Imports the library.

    Raises:
        RequestError: It is not installed, or cannot be imported.
    """
    check_available()
    try:
        return importlib.import_module(NAME)
    except ImportError as e:
        raise RequestError(
            f"structured_outputs needs the package {NAME}, which cannot be imported: {e}. "
            f"Run: {install_command(REQUIREMENT, reinstall=True)}, and start the engine again.",
            parameter="structured_outputs",
        ) from e


def limits(library: Any) -> Any:
    """Limits on the work for one token, so that steps stay short whatever the grammar is.

    Large lexemes are not precomputed over the whole vocabulary: most of that would not be used.
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
