"""Plugin module of the platform `interpreted`: see host_platforms.py."""

from __future__ import annotations

import dataclasses

from mvllm.plugin_api import PlatformSpec, ProbeResult, hookimpl
from mvllm_cuda.plugin import SPEC as CUDA

SPEC = dataclasses.replace(
    CUDA,
    name="interpreted",
    probe="tests.gpu.interpreted_plugin:probe",
    factory="tests.gpu.host_platforms:InterpretedPlatform",
    by_name_only=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(True, "the host is always there")
