"""Parses integers with a unit: `32k`, `1.5m`, `64K`.

32768    32k = 32,000    32K = 32,768    1m = 1,000,000    1M = 1,048,576    likewise g, G, t and T
64MB = 64,000,000    64MiB = 67,108,864    likewise KB, GB, TB, KiB, GiB and TiB, in any case of letters
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from decimal import Decimal

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?)\s?([KMGT])(I?)B", re.ASCII | re.IGNORECASE)
_FORM = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?)([kmgtKMGT])", re.ASCII)


def human_readable_int(text: str, words: Sequence[str] = ()) -> int:
    """The integer that `text` stands for. Lower-case suffixes are powers of 1000, upper-case ones of 1024.

    Args:
        words: What the option takes beside integers, for the error.

    Raises:
        ArgumentTypeError: `text` is not such a number.
    """
    try:
        if (size := _BYTES.fullmatch(text.strip())) is not None:
            units = _BINARY if size[3] else {unit.upper(): factor for unit, factor in _DECIMAL.items()}
            return int(Decimal(size[1].replace("_", "")) * units[size[2].upper()])
        if (found := _FORM.fullmatch(text.strip())) is None:
            return int(text)
        number, suffix = found.groups()
        if suffix in _BINARY:
            return int(number) * _BINARY[suffix]
        value = Decimal(number.replace("_", "")) * _DECIMAL[suffix]
        if value == int(value):
            return int(value)
    except ValueError:
        pass
    kinds = " or ".join(["an integer", *map(repr, words)])
    raise argparse.ArgumentTypeError(
        f"must be {kinds}, found {text!r}. 32k stands for 32,000, 32K for 32,768, and 1.5m for 1,500,000 (k, m, g, "
        "t are powers of 1000; K, M, G, T powers of 1024, of a whole number; 64MB and 64MiB are bytes)."
    )
