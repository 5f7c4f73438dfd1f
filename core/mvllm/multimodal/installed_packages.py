"""Which packages that processors of transformers need are installed."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Imports nothing."""
    return importlib.util.find_spec(package) is not None
