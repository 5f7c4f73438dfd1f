"""Entry point of the TPU platform: who it is, before anything heavy is imported."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="tpu",
    vendor="Google",
    contract=(1, 0),
    probe="mvllm_tpu.probe:probe",
    factory="mvllm_tpu.platform:make_platform",
    torch_floor="2.6",
    torch_backend="tpu",  # torch_tpu's name in torch; torch_xla takes none
    priority=10,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The TPU platform's identity card."""
    return SPEC
