"""The hooks that a platform plugin implements, found and checked by pluggy."""

from __future__ import annotations

import pluggy

from mvllm.contract import ANY_PROCESS, phase
from mvllm.platform.spec import PlatformSpec

PROJECT = "mvllm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
@phase(ANY_PROCESS)
def mvllm_platform() -> PlatformSpec:  # type: ignore[empty-body]
    """Returns the plugin's PlatformSpec.

    Called at discovery. Listing platforms imports the module that implements it, so that module imports
    nothing heavier than `mvllm.plugin_api`.
    """
