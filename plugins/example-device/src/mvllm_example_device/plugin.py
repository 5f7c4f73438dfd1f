"""Entry point of the example platform: its PlatformSpec and probe. Imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mvllm.plugin_api import DeviceInfo, PlatformSpec, ProbeResult, hookimpl, install_command
from mvllm_example_device.settings import Settings

SPEC = PlatformSpec(
    name="example",
    vendor="mvllm",
    contract=(1, 1),
    probe="mvllm_example_device.plugin:probe",
    factory="mvllm_example_device.platform:make_platform",
    torch_floor="2.6",
    by_name_only=True,
    torch_backend="example",
    probe_in_process=True,
)
DTYPES = ("float32", "bfloat16")
LIBRARY = Path(__file__).with_name("_device.so")


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The platform's PlatformSpec."""
    return SPEC


def probe() -> ProbeResult:
    """Available if torch is installed, the device is compiled, and the environment variables are valid."""
    try:
        settings = Settings.from_environment()
    except ValueError as e:
        return ProbeResult(False, str(e), remedy="correct or unset the variable")
    if importlib.util.find_spec("torch") is None:
        return ProbeResult(False, "torch is not installed", remedy="install torch, then reinstall mvllm-example-device")
    if not LIBRARY.exists():
        command = install_command("mvllm-example-device", reinstall=True)
        remedy = f"reinstall it where there is a C++ compiler, with --no-build-isolation: {command}"
        return ProbeResult(False, "the device has not been compiled", remedy=remedy)
    devices = tuple(DeviceInfo(i, "host memory", settings.memory) for i in range(settings.devices))
    return ProbeResult(True, f"{settings.devices} devices in mode {settings.mode}", devices)
