"""Entry point of the MLX platform: its PlatformSpec. Imports neither torch nor MLX."""

from __future__ import annotations

import sys

from mvllm.plugin_api import PlatformSpec, hookimpl

SPEC = PlatformSpec(
    name="mlx",
    vendor="Apple",
    contract=(1, 1),
    probe="mvllm_mlx.probe:probe",
    factory="mvllm_mlx.platform:make_platform",
    torch_floor="2.6",
    # Under Linux MLX computes on the processor, for which mvllm-cpu is faster.
    priority=20 if sys.platform == "darwin" else -10,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    """The PlatformSpec of the MLX platform."""
    return SPEC
