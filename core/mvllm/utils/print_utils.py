"""Prints vectors in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHOWN = 4


def print_embeddings(embeddings: Sequence[Any], prefix: str = "Embeddings") -> None:
    """Prints the first and last components of a vector, and its length."""
    shown = [f"{float(each):.4g}" if isinstance(each, float) else str(each) for each in embeddings]
    if len(shown) > 2 * _SHOWN:
        shown = [*shown[:_SHOWN], "...", *shown[-_SHOWN:]]
    print(  # noqa: T201  (this is its task)
        f"{prefix}: [{', '.join(shown)}] (size={len(embeddings)})"
    )
