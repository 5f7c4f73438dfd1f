"""Looks for markers in text that is still coming."""

from __future__ import annotations

import re
from collections.abc import Sequence


def compile_markers(markers: Sequence[str]) -> re.Pattern[str]:
    """Finds whichever of `markers` comes first. Plain strings side by side: takes time linear in the text."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


def partial_marker_length(text: str, start: int, markers: Sequence[str]) -> int:
    """Characters at the end of `text`, not before `start`, that may be the beginning of one of `markers`."""
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
    """Whether all of `text` from `start` on is a beginning of `marker`, shorter than it."""
    return len(text) - start < len(marker) and marker.startswith(text[start:])
