"""Entry point of the ROCm platform: its PlatformSpec. Imports no torch."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="rocm",
    vendor="AMD",
    contract=(1, 1),
    probe="mvllm_rocm.probe:probe",
    factory="mvllm_rocm.platform:make_platform",
    torch_floor="2.6",
    priority=10,
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The PlatformSpec of the ROCm platform."""
    return SPEC
