"""Optional accelerators of whole steps: captured graphs and compilers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class GraphBackend(ABC):
    """Records a step once and replays it. Phase: worker.

    Returned by `Platform.graphs`, where `Capabilities.graphs` is set. Errors are raised as PlatformError.
    """

    @abstractmethod
    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Runs `step` while recording and returns a replay.

        The replay reads inputs from, and leaves results in, the very tensors that `step` used.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Device memory held by all captured graphs."""


class CompileBackend(ABC):
    """Turns a callable over tensors into a faster one. Phase: worker.

    Returned by `Platform.compiler`, where `Capabilities.compile` is set. Errors are raised as PlatformError.
    """

    @abstractmethod
    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """A callable with the same results; `dynamic` tells whether shapes may vary without recompilation."""

    @abstractmethod
    def cache_key(self) -> str:
        """Changes whenever compiled results from before must not be reused (compiler, plugin or device changed)."""
