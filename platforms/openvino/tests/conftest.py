"""Skips what needs OpenVINO where it is not installed; the lane `openvino` of ci/matrix.toml has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

WITH_OPENVINO = ("test_attention.py", "test_multimodal.py", "test_operations.py", "test_parity.py", "test_program.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("openvino") is None:
        skip = pytest.mark.skip(reason="openvino is not installed: python3 ci/matrix.py run openvino installs it")
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name in WITH_OPENVINO:
                item.add_marker(skip)
