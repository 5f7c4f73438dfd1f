"""Text helpers for the messages of probes."""

from __future__ import annotations

from collections.abc import Sequence


def counted(names: Sequence[str]) -> str:
    """`2 × this, 1 × that`, in the order of their first appearance."""
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def sentence(text: str) -> str:
    """A reason with an initial capital and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without a full stop."""
    return str(error).partition("\n")[0].rstrip(".")
