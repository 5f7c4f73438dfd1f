"""The level of the log: an argument, the environment, a command's default, what is set already, INFO."""

from __future__ import annotations

import logging

import pytest

from mvllm.logging import configure_logging, log_level


@pytest.mark.parametrize(
    ("level", "variable", "default", "current", "expected"),
    [
        (None, None, None, "NOTSET", "INFO"),
        (None, None, "WARNING", "INFO", "WARNING"),
        (None, None, None, "WARNING", "WARNING"),  # as when a command that has set it makes an LLM
        (None, "info", "WARNING", "WARNING", "INFO"),
        ("debug", "INFO", "WARNING", "NOTSET", "DEBUG"),
        (None, "loud", "WARNING", "NOTSET", "INFO"),
    ],
)
def test_what_sets_the_level(monkeypatch, level, variable, default, current, expected):
    logging.getLogger("mvllm").setLevel(current)
    monkeypatch.delenv("MVLLM_LOGGING_LEVEL", raising=False)
    if variable:
        monkeypatch.setenv("MVLLM_LOGGING_LEVEL", variable)
    configure_logging(level, default=default)
    assert log_level() == expected
