"""The interface between LLMEngine and its engine core (EngineCoreClient)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from mvllm.engine.process.core_client_properties import CoreClientProperties
from mvllm.messages.core_protocol import UtilityArg
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest

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

    def call_utility(self, method: str, *args: UtilityArg) -> Any:
        """Calls a method of the engine core and returns its result, see `EngineCore.call_utility`."""

    def collective_rpc(self, method: str, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
        """Calls a method of every worker, see `Executor.collective_rpc`."""

    def apply_model(self, function: Callable[[Any], _T]) -> list[_T]:
        """Calls a function with the model of every worker, see `Executor.apply_model`."""

    def shutdown(self) -> None:
        """Ends the engine core. Idempotent."""
