"""Fixture `machine`: makes this process see a machine with the given NVIDIA devices."""

from __future__ import annotations

import pytest
from platforms.cuda.tests import fake_nvml

from mvllm_cuda import nvml


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sets the machine: `machine(line, ...)`, see fake_nvml. No environment variable hides its devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def described(*lines):
        monkeypatch.setattr(nvml, "LIBRARY", str(fake_nvml.library()))
        monkeypatch.setenv(fake_nvml.VARIABLE, str(fake_nvml.describe(tmp_path, *lines)))

    return described
