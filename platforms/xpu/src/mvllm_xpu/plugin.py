"""Entry point of the XPU platform: its PlatformSpec. Imports no torch."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="xpu",
    vendor="Intel",
    contract=(1, 1),
    probe="mvllm_xpu.probe:probe",
    factory="mvllm_xpu.platform:make_platform",
    torch_floor="2.7",
    priority=10,
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The PlatformSpec of the XPU platform."""
    return SPEC
