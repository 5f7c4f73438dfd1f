"""Sides of squares in config.json, which some checkpoints give as two equal numbers."""

from __future__ import annotations

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError


def square_size(vision: HFConfig, key: str, default: int) -> int:
    """An integer >= 1, or two equal ones.

    Raises:
        ModelError: The value is neither.
    """
    value = vision.get(key, default)
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(type(side) is int and side > 0 for side in sides) or len(set(sides)) > 1:
        raise ModelError(
            f"{vision.source}: {key!r} should be an integer >= 1 or two equal ones, found {value!r:.80}. "
            "Towers for images that are not square are not supported."
        )
    return int(sides[0])
