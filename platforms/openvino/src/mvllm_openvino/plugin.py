"""Entry point of the OpenVINO platform: its PlatformSpec. Imports neither torch nor OpenVINO."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="openvino",
    vendor="Intel",
    contract=(1, 1),
    probe="mvllm_openvino.probe:probe",
    factory="mvllm_openvino.platform:make_platform",
    torch_floor="2.6",
    by_name_only=True,  # it uses the same processor as the platform `cpu`
    probe_in_process=True,
    is_host=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The PlatformSpec of the OpenVINO platform."""
    return SPEC
