"""Plugins `hosted-xpu` (with kernels) and `hosted-xpu-sdpa` (without): the XPU platform with the host as its device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mvllm.plugin_api import ProbeResult
from mvllm_xpu.plugin import SPEC as XPU
from tests.helpers.plugins import ROOT, write_metadata

SPEC = dataclasses.replace(
    XPU,
    name="hosted-xpu",
    probe="platforms.xpu.tests.hosted_plugin:probe",
    factory="platforms.xpu.tests.hosted_platform:HostedPlatform",
    by_name_only=True,
)
SDPA = dataclasses.replace(SPEC, name="hosted-xpu-sdpa", factory="platforms.xpu.tests.hosted_platform:WithoutKernels")


def probe() -> ProbeResult:
    return ProbeResult(True, "the host is always there")


def path(folder: Path) -> list[str]:
    """Entries of the module search path that install both plugins."""
    entries = "[mvllm.platforms]\n"
    entries += "".join(f"{spec.name} = platforms.xpu.tests.{module}\n" for spec, module in PLUGINS)
    return [str(write_metadata(folder, "mvllm-hosted-xpu", entries)), str(ROOT)]


PLUGINS = ((SPEC, "plugin_with_kernels"), (SDPA, "plugin_without_kernels"))
