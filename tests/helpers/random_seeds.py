"""Seeds of the generators that a process shares, so that a test draws the same numbers after any other test."""

from __future__ import annotations

import random
import sys
import zlib


def seed_generators(name: str) -> None:
    """Seeds Python's, NumPy's and torch's global generators, of those libraries that are imported, by a test's name."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)
