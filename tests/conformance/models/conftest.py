"""Parametrizes the classes of this folder with the checkpoints that they name."""

import pytest

from tests.helpers.model_zoo import marked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "checkpoint" in metafunc.fixturenames:
        metafunc.parametrize("checkpoint", marked(metafunc.cls.names))
