"""Fixture `machine`: makes this process see a machine with the given Intel GPUs."""

from __future__ import annotations

import pytest
from platforms.xpu.tests.machines import build

from mvllm_xpu import topology
from mvllm_xpu.visible_devices import VARIABLES


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sets the machine: `machine(device, ...)`, see machines.py, returns its root. No variable hides its devices."""
    for variable in (*VARIABLES, topology.BUS_ORDER, "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)

    def described(*devices, **options):
        root = build(tmp_path / f"machine{len(list(tmp_path.iterdir()))}", *devices, **options)
        monkeypatch.setattr(topology, "ROOT", root)
        return root

    return described
