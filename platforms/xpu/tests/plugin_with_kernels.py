"""Entry point of the platform `hosted-xpu`: see hosted_plugin.py."""

from __future__ import annotations

from platforms.xpu.tests.hosted_plugin import SPEC

from mvllm.plugin_api import PlatformSpec, hookimpl


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC
