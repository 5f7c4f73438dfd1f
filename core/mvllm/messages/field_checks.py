"""Checks of single field values of a request: integers, numbers, booleans, texts and token ids.

A check takes the field's name and a value, and returns the value to keep or raises a `RequestError`.
"""

from __future__ import annotations

import enum
import math
import numbers
import sys
from collections.abc import Callable
from typing import Any

from mvllm.errors import RequestError

Check = Callable[[str, Any], Any]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
LARGEST_FLOAT = sys.float_info.max


def reject(name: str, value: object, expected: str) -> Any:
    """Raises a RequestError that names the field, the expected value and the value found."""
    raise RequestError(f"{name} must be {expected}; got {describe_value(value)}", parameter=name)


def describe_value(value: object) -> str:
    """A value in at most about 60 ASCII characters. Calls no code of unknown types."""
    kind = type(value)
    if kind is str:
        text = value[:40] + "..." if len(value) > 40 else value  # type: ignore[index, arg-type]
        return repr(text).encode("ascii", "backslashreplace").decode()
    if kind is int:
        return str(value) if abs(value) < 2**64 else f"an integer of {value.bit_length()} bits"  # type: ignore
    if kind in (list, tuple, set, dict):
        return f"a {kind.__name__} of {len(value)} items"  # type: ignore[arg-type]
    known = kind in (bool, float, type(None)) or issubclass(kind, enum.Enum)
    return repr(value) if known else f"a value of type {kind.__name__}"


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8, which a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_int(value: object) -> int | None:
    """An integer of any library as an int; None for other values, booleans included."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def as_float(value: object) -> float | None:
    """A real number of any library as a float; None for other values, booleans included."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return math.inf


def integer(
    low: int, high: int, *, means_unset: int | None = None, unset: int | None = None, optional: bool = False
) -> Check:
    """Checks for an integer in [low, high]. `unset` replaces `means_unset`; None is allowed only if `optional`."""
    span = f"from {low} to {high}" if high < INT64_MAX else f">= {low} (in 64 bits)"
    expected = f"an integer {span}"

    def check(name: str, value: object) -> int | None:
        if value is None and optional:
            return None
        number = as_int(value)
        if number is None or not low <= number <= high:
            return reject(name, value, expected)
        return unset if number == means_unset and means_unset is not None else number

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """Checks for a finite number in [low, high], or in (low, high] if `above`. NaN is rejected."""
    left = f"> {low:g}" if above else f">= {low:g}"
    expected = f"a finite number {left}" if high == LARGEST_FLOAT else f"a number {left} and <= {high:g}"

    def check(name: str, value: object) -> float:
        number = as_float(value)
        if number is None or not low <= number <= high or (above and number == low):
            return reject(name, value, expected)
        return number

    return check


def boolean(name: str, value: object) -> bool:
    """Checks for True or False."""
    return value if isinstance(value, bool) else reject(name, value, "True or False")


_token_id = integer(0, 2**31 - 1)


def token_ids(name: str, value: list[Any] | tuple[Any, ...]) -> list[int]:
    """Checks that every item is an integer from 0 to 2**31 - 1. A long list of plain ints is checked at once."""
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31:
        return list(value)
    return [_token_id(name, item) for item in value]
