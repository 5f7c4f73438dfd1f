"""Entry point of the CUDA platform: its PlatformSpec. Imports no torch."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="cuda",
    vendor="NVIDIA",
    contract=(1, 1),
    probe="mvllm_cuda.probe:probe",
    factory="mvllm_cuda.platform:make_platform",
    torch_floor="2.6",
    priority=10,
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The PlatformSpec of the CUDA platform."""
    return SPEC
