"""The interface between LLMEngine and its engine core (EngineCoreClient)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from mvllm.engine.process.core_client_properties import CoreClientProperties
from mvllm.messages.commands import EngineCommand
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest

_R = TypeVar("_R")
_T = TypeVar("_T")


class EngineCoreClient(CoreClientProperties, Protocol):
    """The engine-core interface that LLMEngine uses, for a core in this process or another."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request."""

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests; unknown ids are ignored."""

    def has_requests(self) -> bool:
        """Whether `step` has work."""

    def step(self) -> EngineCoreOutputs:
        """Runs one step."""

    def interrupt_step(self) -> None:
        """Makes a waiting `step` return early. Callable in any thread or a signal handler."""

    def call(self, command: EngineCommand[_R]) -> _R:
        """The engine core's answer to a command."""

    def collective_rpc(self, method: str, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
        """Calls a method of every worker, see `Executor.collective_rpc`."""

    def apply_model(self, function: Callable[[Any], _T]) -> list[_T]:
        """Calls a function with the model of every worker, see `Executor.apply_model`."""

    def shutdown(self) -> None:
        """Ends the engine core. Idempotent."""
