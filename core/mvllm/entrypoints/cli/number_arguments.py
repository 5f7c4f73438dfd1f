"""Argument types of numbers with a lower bound, for `type=` of argparse. Each raises ArgumentTypeError."""

from __future__ import annotations

import argparse

from mvllm.config.human_readable_int import human_readable_int

_MAX_SECONDS = 1e9


def positive_int(text: str) -> int:
    """An integer of at least 1, such as `32k`."""
    return _int_from(1, text)


def non_negative_int(text: str) -> int:
    """An integer of at least 0, such as `32k`."""
    return _int_from(0, text)


def seconds(text: str) -> float:
    """A number of seconds from 0 on."""
    number = float(text)
    if not 0 <= number < _MAX_SECONDS:
        raise argparse.ArgumentTypeError("must be a number of seconds from 0 on")
    return number


def positive_seconds(text: str) -> float:
    """A number of seconds above 0."""
    number = float(text)
    if not 0 < number < _MAX_SECONDS:
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return number


def _int_from(minimum: int, text: str) -> int:
    number = human_readable_int(text)
    if number < minimum:
        raise argparse.ArgumentTypeError(f"must be at least {minimum}")
    return number
