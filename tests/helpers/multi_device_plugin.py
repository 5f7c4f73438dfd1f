"""Plugin module of the platform `several`; see tests.helpers.multi_device_platform."""

from __future__ import annotations

import os

from mvllm.plugin_api import DeviceInfo, PlatformSpec, ProbeResult, hookimpl

VARIABLE = "SEVERAL_DEVICES"
"""The environment variable with the number of devices that a worker drives."""
FAULT = "SEVERAL_DEVICES_FAULT"

SPEC = PlatformSpec(
    name="several",
    vendor="tests",
    contract=(1, 0),
    probe="tests.helpers.multi_device_plugin:probe",
    factory="tests.helpers.multi_device_platform:MultiDevicePlatform",
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    if VARIABLE not in os.environ:
        return ProbeResult(False, f"{VARIABLE} is not set", remedy=f"set {VARIABLE}")
    devices = tuple(DeviceInfo(i, "a part of the host") for i in range(8))
    return ProbeResult(True, f"{VARIABLE} is set", devices=devices)
