"""How steps are compiled with torch_xla. Imports no torch.

MVLLM_TPU_COMPILE   openxla (default): torch.compile, for workers with one device
                    lazy: the model's Python code records its operations in every step
"""

from __future__ import annotations

import os

from mvllm.plugin_api import ConfigError

VARIABLE = "MVLLM_TPU_COMPILE"
_MODES = ("openxla", "lazy")


def mode() -> str:
    """`openxla` or `lazy`.

    Raises:
        ConfigError: The variable has another value.
    """
    asked = os.environ.get(VARIABLE) or _MODES[0]
    if asked not in _MODES:
        raise ConfigError(f"{VARIABLE}={asked!r} is not supported; set it to one of {', '.join(_MODES)}, or unset it.")
    return asked
