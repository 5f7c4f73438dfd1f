"""The conformance suite within the project's own tests: every clause, on thinned-out grids, for the CPU platform.

`python3 ci/dev.py conform cpu` runs all of it; here `pytest tests/conformance --mvllm-platform NAME` examines another.
"""

from __future__ import annotations

import pytest

from mvllm.testing import plugin
from mvllm.testing.plugin import *  # noqa: F403


def pytest_configure(config: pytest.Config) -> None:
    config.option.mvllm_platform = config.getoption("mvllm_platform", None) or "cpu"
    config.option.mvllm_quick = True
    plugin.pytest_configure(config)
