"""Entry point of the platform `hosted-xpu-sdpa`: see hosted_plugin.py."""

from __future__ import annotations

from platforms.xpu.tests.hosted_plugin import SDPA

from mvllm.plugin_api import PlatformSpec, hookimpl


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SDPA
