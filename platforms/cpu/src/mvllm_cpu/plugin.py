"""Entry point of the CPU platform: its PlatformSpec. Imports no torch."""

from __future__ import annotations

try:
    from mvllm.plugin_api import PlatformSpec, hookimpl
except ModuleNotFoundError as e:
    if e.name != "mvllm.plugin_api":
        raise
    raise ImportError(
        "mvllm-cpu belongs to the inference engine mvllm, but the package mvllm of this environment is another "
        "project's, which has this name on the public package index. Make a new environment, and install the engine "
        "there as its page docs/how-to/install.md says."
    ) from e

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
