"""The hooks that a platform plugin implements. pluggy finds and checks them; afterwards plain objects run."""

from __future__ import annotations

import pluggy

from mvllm.platform.spec import PlatformSpec

PROJECT = "mvllm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def mvllm_platform() -> PlatformSpec:  # type: ignore[empty-body]
    """Returns the plugin's PlatformSpec.

    Phase: any process, at discovery. The module that implements it is imported by listing and choosing, so it imports
    nothing heavier than `mvllm.plugin_api`.
    """
