"""Plugin module of the platform `replayed`: see host_platforms.py."""

from __future__ import annotations

import dataclasses

from mvllm.plugin_api import PlatformSpec, ProbeResult, hookimpl
from mvllm_cuda.plugin import SPEC as CUDA

SPEC = dataclasses.replace(
    CUDA,
    name="replayed",
    probe="tests.gpu.replayed_plugin:probe",
    factory="tests.gpu.host_platforms:ReplayedPlatform",
    by_name_only=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(True, "the host is always there")
