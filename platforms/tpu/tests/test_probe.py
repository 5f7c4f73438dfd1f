"""The probe on machines with and without TPUs; it loads neither torch nor XLA."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from mvllm.plugin_api import CheckStatus
from mvllm_tpu import doctor, xla_devices
from mvllm_tpu.probe import probe
from tests.helpers.plugins import ROOT


def test_without_a_tpu_the_remedy_is_xlas_cpu_device(host, installed):
    installed("torch_xla")
    found = probe()
    assert not found.available and "There is no TPU" in found.reason
    assert "PJRT_DEVICE=CPU" in found.remedy


def test_without_a_runtime_the_remedy_names_the_package(host, installed, monkeypatch):
    installed()
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    found = probe()
    assert not found.available and "torch_xla is not installed" in found.reason
    assert "mvllm-tpu[torch-xla]" in found.remedy


@pytest.mark.parametrize(("count", "shown"), [(None, "XLA's CPU device"), ("2", "2 x XLA's CPU device")])
def test_xlas_cpu_device_is_used_if_selected(host, installed, monkeypatch, count, shown):
    installed("torch_xla")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "cpu")
    if count:
        monkeypatch.setenv(xla_devices.NUM_CPUS_VARIABLE, count)
    found = probe()
    assert found.available and found.reason == f"{shown}, through torch_xla"
    assert len(found.devices) == int(count or 1)


@pytest.mark.parametrize("text", ["0", "two", "-1", ""])
def test_an_invalid_number_of_devices_is_an_error(host, installed, monkeypatch, text):
    installed("torch_xla")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    monkeypatch.setenv(xla_devices.NUM_CPUS_VARIABLE, text)
    found = probe()
    assert not found.available and repr(text) in found.reason and found.remedy


def test_chips_are_counted_and_named(host, installed):
    installed("torch_xla")
    host.add("0x005e", "0x005e", "0x1234")
    host.files("accel0", "accel1")
    found = probe()
    assert found.available and [device.name for device in found.devices] == ["TPU v4", "TPU v4"]


def test_newer_chips_are_found_through_vfio(host, installed):
    installed("torch_xla")
    host.add("0x006f")
    host.files("vfio/vfio", "vfio/0")
    assert [device.name for device in probe().devices] == ["TPU v6e"]


def test_vfio_groups_of_other_devices_are_not_chips(host, installed):
    installed("torch_xla")
    host.files("vfio/vfio", "vfio/12")
    assert not probe().available


def test_chips_without_device_files_are_reported(host, installed):
    installed("torch_xla")
    host.add("0x0063")
    found = probe()
    assert not found.available and "TPU v5e is there" in found.reason and "--device" in found.remedy


def test_device_files_that_this_user_may_not_open_are_reported(host, installed, monkeypatch):
    installed("torch_xla")
    host.add("0x0063")
    host.files("vfio/vfio", "vfio/0")
    monkeypatch.setattr(xla_devices.os, "access", lambda path, mode: path.name != "0")
    found = probe()
    assert not found.available and "TPU v5e is there, but this user may not open /dev/vfio/0" in found.reason
    [check] = [check for check in doctor.checks() if check.id == "platform.tpu.devices"]
    assert check.status is CheckStatus.BROKEN and check.remedy == found.remedy and "ls -l" in check.remedy


def test_hidden_chips_are_not_shown(host, installed, monkeypatch):
    installed("torch_xla")
    host.add("0x005e", "0x0063")
    host.files("accel0", "accel1")
    monkeypatch.setenv(xla_devices.VISIBLE_VARIABLE, "1")
    assert [device.name for device in probe().devices] == ["TPU v5e"]
    monkeypatch.setenv(xla_devices.VISIBLE_VARIABLE, "1,7")
    found = probe()
    assert not found.available and "7, of 2 chips" in found.reason and "0 to 1" in found.remedy


def test_another_value_of_pjrt_device_is_unavailable(host, installed, monkeypatch):
    installed("torch_xla")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "ROCKET")
    found = probe()
    assert not found.available and "'ROCKET'" in found.reason and xla_devices.PJRT_VARIABLE in found.remedy


@pytest.fixture
def versions(monkeypatch):
    """`versions(name=version, ...)`: the installed distributions."""

    def only(**found):
        monkeypatch.setattr("mvllm_tpu.runtimes.torch_xla.version", lambda name: found.get(name, "none"))

    return only


@pytest.mark.parametrize("torch", ["2.15.0", "2.13.0+cpu"])
def test_torch_xla_with_a_torch_of_another_version_is_unavailable(host, installed, versions, monkeypatch, torch):
    """Its metadata does not require torch, and importing it fails."""
    installed("torch_xla")
    versions(torch_xla="2.9.0", torch=torch)
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    found = probe()
    assert not found.available and f"torch_xla 2.9.0 needs torch 2.9, and torch {torch} is installed" in found.reason
    assert "mvllm-tpu[torch-xla]" in found.remedy
    [check] = [check for check in doctor.checks() if check.id == "platform.tpu.runtime"]
    assert check.status is CheckStatus.BROKEN and "needs torch 2.9" in check.found and check.remedy == found.remedy


def test_torch_xla_runs_with_every_build_of_its_torch(host, installed, versions, monkeypatch):
    installed("torch_xla")
    versions(torch_xla="2.9.0", torch="2.9.1+cpu")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    assert probe().available
    assert {check.status for check in doctor.checks()} == {CheckStatus.OK}


def test_the_doctor_reports_devices_that_the_runtime_does_not_open(host, installed, monkeypatch):
    installed("torch_tpu")
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    [check] = [check for check in doctor.checks() if check.id == "platform.tpu.runtime"]
    assert check.status is CheckStatus.BROKEN and "no CPU device" in check.found


def test_the_extras_require_the_torch_for_which_torch_xla_was_built():
    project = tomllib.loads((ROOT / "platforms/tpu/pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "ci/constraints/tpu.txt").read_text().splitlines() if "==" in line)
    for extra in ("torch-xla", "pallas"):
        required = [Requirement(each) for each in project["optional-dependencies"][extra]]
        assert {each.name for each in required} == {"torch", "torch_xla"}
        for each in required:
            assert each.specifier.contains(pins[each.name])
            assert not any(each.specifier.contains(other) for other in ("2.8.0", "2.10.0", "2.15.0"))


@pytest.mark.parametrize("asked", ["nonsense", "torch_xla"])
def test_an_unavailable_runtime_is_an_error(host, installed, monkeypatch, asked):
    installed()
    monkeypatch.setenv(xla_devices.PJRT_VARIABLE, "CPU")
    monkeypatch.setenv("MVLLM_TPU_RUNTIME", asked)
    found = probe()
    assert not found.available and asked in found.reason and found.remedy


def test_the_probe_loads_neither_torch_nor_xla():
    program = (
        "import sys; from mvllm_tpu.probe import probe; probe(); from mvllm_tpu.platform import make_platform; "
        "make_platform().capabilities; print({'torch', 'torch_xla'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stderr
