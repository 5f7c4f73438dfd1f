"""One worker that drives several devices: the whole model is one to core, and each device has its part of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mvllm import LLM
from mvllm.errors import ConfigError, MvllmError, PlatformError
from tests.engine.test_multiproc_parity import check_under_pressure
from tests.helpers import parity, several_devices
from tests.helpers.plugins import prepend, several_platform_path
from tests.helpers.several_plugin import FAULT, VARIABLE

Drive = Callable[[int], None]

PARTS = {
    "one embedding serves as head; heads, gates and vocabulary are cut": ("llama-mha-tied", 2),
    "one key/value head is copied to both devices, and there are biases": ("llama-mqa-biases", 2),
    "four devices for two key/value heads": ("llama-gqa", 4),
    "a vocabulary that leaves the last of four devices fewer rows": ("qwen2-odd-vocabulary", 4),
    "a vocabulary that two cannot halve, tied": ("llama-odd-vocabulary-tied", 2),
    "norms of each head, one key/value head on four devices": ("qwen3-mqa", 4),
    "norms over all heads, one of them copied": ("olmo2-mqa-biases", 2),
    "queries, keys and values in one matrix, positions in a table": ("gpt2", 2),
    "a window, and a copied head": ("mistral-window-yarn", 2),
}


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Says how many devices a worker of the platform `several` drives."""
    prepend(monkeypatch, several_platform_path(tmp_path))
    monkeypatch.setattr(several_devices, "GATHERED", [])
    return lambda count: monkeypatch.setenv(VARIABLE, str(count))


@pytest.mark.parametrize(("name", "devices"), PARTS.values(), ids=PARTS.keys())
def test_a_model_on_several_devices_gives_the_tokens_of_transformers(drive: Drive, name: str, devices: int) -> None:
    drive(devices)
    check_under_pressure(name, devices, 1, devices, platform="several")
    assert several_devices.GATHERED == [], "nobody needs a tensor whole that the devices share"
