"""Packages that connect torch and XLA; a process uses one of them.

MVLLM_TPU_RUNTIME selects it; by default, it is the first one that is installed. A runtime is chosen without importing
its library.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

from mvllm.plugin_api import ConfigError
from mvllm_tpu.runtimes.interface import Runtime

VARIABLE = "MVLLM_TPU_RUNTIME"

KNOWN = {
    "torch_xla": "mvllm_tpu.runtimes.torch_xla:TorchXla",
    "torch_tpu": "mvllm_tpu.runtimes.torch_tpu:TorchTpu",
}
"""`module:class` by the name of the library, in the order of preference."""


def choose() -> Runtime | None:
    """The runtime to use, or None if none is installed.

    Raises:
        ConfigError: The variable names an unknown runtime, or one that is not installed.
    """
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return next((load(name) for name in KNOWN if is_installed(name)), None)
    if asked not in KNOWN:
        raise ConfigError(f"{VARIABLE}={asked!r} is no runtime. Use one of {', '.join(KNOWN)}, or unset it.")
    if not is_installed(asked):
        raise ConfigError(f"{VARIABLE} asks for {asked}, which is not installed. Install it, or unset {VARIABLE}.")
    return load(asked)


def is_installed(name: str) -> bool:
    """Whether an import would find the library."""
    return importlib.util.find_spec(name) is not None


def load(name: str) -> Runtime:
    """The runtime of this name. Its library is imported when a worker binds a device."""
    module, _, attribute = KNOWN[name].partition(":")
    made: Runtime = getattr(importlib.import_module(module), attribute)()
    return made
