"""Fixture `machine`: makes this process see a machine with the given AMD devices."""

from __future__ import annotations

import pytest
from platforms.rocm.tests.machines import build

from mvllm_rocm import topology
from mvllm_rocm.visible_devices import VARIABLES


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Sets the machine: `machine(device, ...)`, see machines.py, returns its root. No variable hides its devices."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def described(*devices, **options):
        root = build(tmp_path / f"machine{len(list(tmp_path.iterdir()))}", *devices, **options)
        monkeypatch.setattr(topology, "ROOT", root)
        return root

    return described
