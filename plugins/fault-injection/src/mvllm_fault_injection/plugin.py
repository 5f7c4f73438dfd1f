"""Entry point of the platform `faulty`, which is available only if FAULT_INJECTION is set."""

from __future__ import annotations

import os

from mvllm.plugin_api import DeviceInfo, PlatformSpec, ProbeResult, hookimpl
from mvllm_example_device.faults import VARIABLE

SPEC = PlatformSpec(
    name="faulty",
    vendor="mvllm",
    contract=(1, 0),
    probe="mvllm_fault_injection.plugin:probe",
    factory="mvllm_fault_injection.platform:make_platform",
    torch_floor="2.6",
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The platform's PlatformSpec."""
    return SPEC


def probe() -> ProbeResult:
    """Available if the variable is set."""
    if VARIABLE in os.environ:
        return ProbeResult(True, f"{VARIABLE} is set", devices=(DeviceInfo(0, "the host"),))
    return ProbeResult(False, f"{VARIABLE} is not set", remedy=f"set {VARIABLE}=none, or to a fault")
