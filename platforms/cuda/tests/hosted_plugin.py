"""Plugin module of the platform `hosted`: the CUDA platform with the host as its device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mvllm.plugin_api import PlatformSpec, ProbeResult, hookimpl
from mvllm_cuda.plugin import SPEC as CUDA
from tests.helpers.plugins import ROOT, write_metadata

SPEC = dataclasses.replace(
    CUDA,
    name="hosted",
    probe="platforms.cuda.tests.hosted_plugin:probe",
    factory="platforms.cuda.tests.hosted_platform:HostedPlatform",
    by_name_only=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult(True, "the host is always there")


def path(folder: Path) -> list[str]:
    """Entries of the module search path that install the plugin."""
    entry = "[mvllm.platforms]\nhosted = platforms.cuda.tests.hosted_plugin\n"
    return [str(write_metadata(folder, "mvllm-hosted", entry)), str(ROOT)]
