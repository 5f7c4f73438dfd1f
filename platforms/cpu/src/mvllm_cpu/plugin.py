"""Entry point of the CPU platform: its PlatformSpec. Imports no torch."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="cpu",
    vendor="mvllm",
    contract=(1, 1),
    probe="mvllm_cpu.probe:probe",
    factory="mvllm_cpu.platform:make_platform",
    torch_floor="2.6",
    probe_in_process=True,
    is_host=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The plugin hook: returns the CPU platform's spec."""
    return SPEC
