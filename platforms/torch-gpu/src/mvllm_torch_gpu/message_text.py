"""Text helpers for the messages of probes."""

from __future__ import annotations

from collections.abc import Sequence


def counted(names: Sequence[str]) -> str:
    """`2 × this, 1 × that`, in the order of their first appearance."""
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def sentence(text: str) -> str:
    """A reason as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def first_line(error: BaseException) -> str:
    """What an error says, without what follows."""
    return str(error).partition("\n")[0].rstrip(".")
