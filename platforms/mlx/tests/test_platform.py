"""The probe and the spec, with and without MLX."""

from __future__ import annotations

import importlib.util

import pytest

from mvllm_mlx import probe as probing
from mvllm_mlx.platform import make_platform
from mvllm_mlx.plugin import mvllm_platform


@pytest.mark.parametrize("missing", ["mlx", "torch"])
def test_the_probe_says_what_is_missing_and_how_to_install_it(monkeypatch, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    found = probing.probe()
    assert not found.available and missing in found.reason
    assert found.remedy is not None and "pip install" in found.remedy


def test_the_probe_finds_the_machine(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    [device] = probing.probe().devices
    assert "MLX" in device.name and device.memory_bytes > 0


def test_it_is_chosen_by_name_only():
    assert mvllm_platform().by_name_only


def test_steps_are_padded_by_less_than_a_half():
    shapes = make_platform().shapes()
    for size in range(16, 5000):
        assert shapes.pad(size, shapes.tokens) < 1.5 * size
        assert shapes.pad(size, shapes.requests) < 2 * size
