"""Entry point of the MLX platform: its PlatformSpec. Imports neither torch nor MLX."""

from __future__ import annotations

try:
    from mvllm.plugin_api import PlatformSpec, hookimpl
except ModuleNotFoundError as e:
    if e.name != "mvllm.plugin_api":
        raise
    raise ImportError(
        "mvllm-mlx belongs to the inference engine mvllm, but the package mvllm of this environment is another "
        "project's, which has this name on the public package index. Make a new environment, and install the engine "
        "there as its page docs/how-to/install.md says."
    ) from e

SPEC = PlatformSpec(
    name="mlx",
    vendor="Apple",
    contract=(1, 1),
    probe="mvllm_mlx.probe:probe",
    factory="mvllm_mlx.platform:make_platform",
    torch_floor="2.6",
    by_name_only=True,
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The PlatformSpec of the MLX platform."""
    return SPEC
