"""Runs the classes of this folder over the checkpoints that they name."""

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "checkpoint" in metafunc.fixturenames:
        metafunc.parametrize("checkpoint", metafunc.cls.names)
