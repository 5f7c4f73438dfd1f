"""The conformance suite in the project's own tests: every clause, on reduced parameter grids, for the CPU platform.

`python3 ci/dev.py conform cpu` runs the full grids; `pytest tests/conformance --mvllm-platform NAME` tests another
platform.
"""

from __future__ import annotations

import pytest

from mvllm.testing import plugin
from mvllm.testing.plugin import *  # noqa: F403


def pytest_configure(config: pytest.Config) -> None:
    config.option.mvllm_platform = config.getoption("mvllm_platform", None) or "cpu"
    config.option.mvllm_quick = True
    plugin.pytest_configure(config)
