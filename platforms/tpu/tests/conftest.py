"""Fixtures that describe the machine and the installed libraries that this process sees."""

from __future__ import annotations

import pytest

from mvllm_tpu import runtimes, xla_devices

VARIABLES = (xla_devices.PJRT_VARIABLE, xla_devices.NUM_CPUS_VARIABLE, xla_devices.VISIBLE_VARIABLE, runtimes.VARIABLE)


@pytest.fixture
def bare(monkeypatch):
    """Unsets the environment variables that select devices and the runtime."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def host(bare, tmp_path, monkeypatch):
    """A machine without TPUs, as a folder. `add(device, ...)` adds chips on its bus, `files(...)` files in /dev."""
    monkeypatch.setattr(xla_devices, "ROOT", tmp_path)

    class Host:
        root = tmp_path

        def add(self, *devices, vendor="0x1ae0"):
            for device in devices:
                folder = tmp_path / f"sys/bus/pci/devices/0000:00:{len(list(tmp_path.rglob('vendor'))):02x}.0"
                folder.mkdir(parents=True)
                (folder / "vendor").write_text(f"{vendor}\n")
                (folder / "device").write_text(f"{device}\n")

        def files(self, *names):
            for name in names:
                path = tmp_path / "dev" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()

    return Host()


@pytest.fixture
def installed(monkeypatch):
    """`installed(name, ...)`: sets the libraries that an import finds."""

    def only(*names):
        monkeypatch.setattr(runtimes, "is_installed", lambda name: name in names)

    return only
