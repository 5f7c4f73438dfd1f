"""Entry point of the TPU platform: its PlatformSpec. Imports no torch."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="tpu",
    vendor="Google",
    contract=(1, 1),
    probe="mvllm_tpu.probe:probe",
    factory="mvllm_tpu.platform:make_platform",
    torch_floor="2.6",
    torch_backend="tpu",  # torch_tpu's backend name in torch; torch_xla registers none
    priority=10,
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The PlatformSpec of the TPU platform."""
    return SPEC
