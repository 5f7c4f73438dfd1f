"""Entry point of the OpenVINO platform: its PlatformSpec. Imports neither torch nor OpenVINO."""

from __future__ import annotations

try:
    from mvllm.plugin_api import PlatformSpec, hookimpl
except ModuleNotFoundError as e:
    if e.name != "mvllm.plugin_api":
        raise
    raise ImportError(
        "mvllm-openvino belongs to the inference engine mvllm, but the package mvllm of this environment is another "
        "project's, which has this name on the public package index. Make a new environment, and install the engine "
        "there as its page docs/how-to/install.md says."
    ) from e

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
