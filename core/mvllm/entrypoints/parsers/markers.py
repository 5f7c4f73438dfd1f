"""Finds markers and beginnings of markers in incremental text."""

from __future__ import annotations

import re
from collections.abc import Sequence


def is_tag(marker: str) -> bool:
    """Whether a marker is a tag or a special token, not a word."""
    return marker[:1] in ("<", "[")


def is_special(marker: str) -> bool:
    """Whether a marker is written as a special token, which no text has, not as an XML tag."""
    return marker[:1] == "[" or (is_tag(marker) and ("|" in marker or "｜" in marker))


def compile_markers(markers: Sequence[str]) -> re.Pattern[str]:
    """A pattern that finds the first of `markers`. An alternation of literals, so searching takes linear time."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


def partial_marker_length(text: str, start: int, markers: Sequence[str]) -> int:
    """Number of characters at the end of `text`, after `start`, that may be the beginning of one of `markers`."""
    longest = 0
    end = len(text)
    for marker in markers:
        at = text.find(marker[0], max(start, end - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                longest = max(longest, end - at)
                break
            at = text.find(marker[0], at + 1)
    return longest


def is_partial_marker(text: str, start: int, marker: str) -> bool:
    """Whether the text from `start` on is a proper prefix of `marker`."""
    return len(text) - start < len(marker) and marker.startswith(text[start:])
