"""Entry point of the MLX platform: its PlatformSpec. Imports neither torch nor MLX."""

from __future__ import annotations

from mvllm.plugin_api import PlatformSpec, hookimpl

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
