"""Skips what needs MLX where it is not installed; the lane `mlx` of ci/matrix.toml has it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

if importlib.util.find_spec("mvllm_mlx") is None:  # the development environment does not install it
    sys.path.append(str(SOURCE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("mlx") is None:
        skip = pytest.mark.skip(reason="mlx is not installed: python3 ci/matrix.py run mlx installs it")
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name != "test_platform.py":
                item.add_marker(skip)
