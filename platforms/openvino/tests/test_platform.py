"""The probe, the plan and the doctor's check, with and without OpenVINO."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import pytest

from mvllm.plugin_api import CheckStatus
from mvllm_openvino import probe as probing
from mvllm_openvino.platform import make_platform
from mvllm_openvino.plugin import mvllm_platform


@pytest.fixture
def installed(monkeypatch):
    """`installed(openvino=VERSION or None, torch=...)`: what an import finds."""

    def only(**versions):
        found = {name for name, version in versions.items() if version is not None}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in found else None)

        def version(name):
            if versions.get(name) is None:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    return only


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"openvino": None, "torch": "2.13.0"}, "openvino not installed"),
        ({"openvino": None, "torch": None}, "openvino and torch not installed"),
        ({"openvino": "2025.4.0", "torch": "2.13.0"}, "OpenVINO is 2025.4.0; 2026.4 is needed"),
    ],
)
def test_the_probe_says_what_is_missing_and_how_to_install_it(installed, versions, reason):
    installed(**versions)
    found = probing.probe()
    assert not found.available and reason in found.reason
    assert found.remedy is not None and "pip install" in found.remedy


def test_the_probe_finds_the_processor(installed):
    installed(openvino="2026.4.1", torch="2.13.0")
    found = probing.probe()
    assert found.available and "OpenVINO 2026.4.1" in found.reason and len(found.devices) == 1


def test_it_is_chosen_by_name_only():
    assert mvllm_platform().by_name_only


def test_the_doctor_says_whether_openvino_is_installed(installed):
    installed(openvino="2026.4.1", torch="2.13.0")
    assert [check.status for check in make_platform().doctor()] == [CheckStatus.OK]
    installed(openvino=None, torch="2.13.0")
    [check] = make_platform().doctor()
    assert check.status == CheckStatus.BROKEN and check.remedy is not None


def test_states_are_not_claimed():
    assert not make_platform().capabilities.state and make_platform().capabilities.graph_compiler
