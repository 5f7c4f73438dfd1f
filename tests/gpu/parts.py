"""The parts of a run, most important first."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from tests.gpu.result_log import ResultLog
from tests.gpu.settings import Item, Settings

PARTS = (
    *("environment", "wheels", "graphs", "kernels", "sanitizer", "bench", "speed", "library_kernels", "parity", "oom"),
    "conformance",
)


class Part(Protocol):
    """What a module of a part offers."""

    def items(self, settings: Settings) -> list[Item]:
        """What there is to run, in order. Imports neither torch nor a platform."""

    def run(self, item: str, settings: Settings, result_log: ResultLog) -> None:
        """Runs one item in this process and adds its rows.

        Raises:
            AssertionError: It found a fault, and the process is still good for the next item.
        """


def load(name: str) -> Part:
    """The module of one of PARTS, or of another part by its dotted path."""
    return cast("Part", importlib.import_module(name if "." in name else f"tests.gpu.{name}"))
