"""The conformance suite in the project's own tests: every clause, on reduced parameter grids, for the CPU platform.

`python3 ci/dev.py conform cpu` runs the full grids; `pytest plugins/conformance/tests/suite --mvllm-platform NAME`
tests another platform.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from mvllm_conformance import plugin
from mvllm_conformance.plugin import *  # noqa: F403

HERE = Path(__file__).parent
EXHAUSTIVE = (
    "test_ops_operations.py::*[[]float16-*",  # bfloat16 and float32 have the same code
    "test_ops_operations.py::test_references_run_on_the_device*",  # this device is the host, as in tests/unit/ops
    "test_ops_operations.py::test_a_row_of_a_batch_invariant_provider*[[]float32-*",  # so in test_batch_invariance
    "test_e2e_engine.py::test_two_pipeline_stages_generate_the_same*",
    "test_dev_device.py::test_each_local_rank_binds_a_device_of_its_own*",
    "test_lif_lifecycle.py::test_an_engine_with_worker_processes_leaves_nothing_however_often_it_is_closed*",
)
"""Patterns of tests of the suite that only the exhaustive tests run here; whole engines in tests/engine cover them."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.mvllm_platform = config.getoption("mvllm_platform", None) or "cpu"
    config.option.mvllm_quick = True
    plugin.pytest_configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    plugin.pytest_collection_modifyitems(config, items)  # this function has replaced it
    for item in items:
        if item.path.parent == HERE and any(fnmatch(f"{item.path.name}::{item.name}", each) for each in EXHAUSTIVE):
            item.add_marker(pytest.mark.exhaustive)
