"""Settings of the example devices from environment variables.

MVLLM_EXAMPLE_DEVICES   number of devices (default 8)
MVLLM_EXAMPLE_MEMORY    bytes of each device (default 2 GiB)
MVLLM_EXAMPLE_MODE      eager    work is done when a call returns (default)
                        static   every new shape counts as a compilation; one after the warm-up is an error
                        lazy     work counts as recorded until the step is marked; a missing mark is an error
                        replay   steps are captured once for each shape and replayed: see replay.py
FAULT_INJECTION         faults to inject: see faults.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mvllm_example_device.faults import VARIABLE

MODES = ("eager", "static", "lazy", "replay")
_DEVICES, _MEMORY, _MODE = "MVLLM_EXAMPLE_DEVICES", "MVLLM_EXAMPLE_MEMORY", "MVLLM_EXAMPLE_MODE"


@dataclass(frozen=True)
class Settings:
    """The settings; see the module."""

    devices: int = 8
    memory: int = 2 << 30
    mode: str = "eager"

    @classmethod
    def from_environment(cls) -> Settings:
        """Reads the environment variables.

        Raises:
            ValueError: A variable has an invalid value.
        """
        mode = os.environ.get(_MODE, cls.mode)
        if mode not in MODES:
            raise ValueError(f"{_MODE} is {mode!r}; it is one of {', '.join(MODES)}")
        return cls(_positive(_DEVICES, cls.devices), _positive(_MEMORY, cls.memory), mode)

    def as_environment(self) -> dict[str, str]:
        """The settings as environment variables, for a worker that does not inherit this process' environment."""
        given = {_DEVICES: str(self.devices), _MEMORY: str(self.memory), _MODE: self.mode}
        return given | ({VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {})


def _positive(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"{name} is {text!r}; it is a positive whole number")
    return int(text)
