"""The part of AsyncLLM for reinforcement learning: pause, weight updates, calls of the workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from mvllm.engine.frontend.weight_update_source import transfer_info, weight_update_in_thread
from mvllm.engine.process.async_core_client import AsyncEngineCoreClient
from mvllm.engine.rollouts import DRAIN_POLL_SECONDS, JOIN_POLL_SECONDS
from mvllm.engine.run_to_end import run_to_end
from mvllm.errors import MvllmError, RequestError
from mvllm.messages.commands import (
    AbandonWeightUpdate,
    CallWorkers,
    EngineCommand,
    FinishWeightUpdate,
    HasJoinedWeightTransfer,
    InitWeightTransfer,
    IsSchedulerPaused,
    IsSchedulerRunning,
    PauseScheduler,
    ResumeScheduler,
    StartWeightUpdate,
    UpdateWeights,
    WeightInfo,
)
from mvllm.messages.weights import WeightTransferInfo

if TYPE_CHECKING:
    import torch

_R = TypeVar("_R")


class AsyncRollouts:
    """Pauses an AsyncLLM and changes its weights.

    Args:
        client: Its engine cores.
        require_alive: Raises if it is closed or dead.

    Attributes:
        num_long_calls: Calls under way that take longer than a step, and during which the cores do not report.
    """

    def __init__(self, client: AsyncEngineCoreClient, require_alive: Callable[[], None]) -> None:
        self._client = client
        self._require_alive = require_alive
        self._pause_lock = asyncio.Lock()  # keeps the order of calls that pause and resume
        self.num_long_calls = 0

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stops computing, and returns when no step runs. Requests that come meanwhile wait for `resume_generation`.
        If it is cancelled, the engine runs on as before.

        Args:
            mode: `abort` ends running requests with the outputs so far and `finish_reason` "abort"; `wait` lets them
                finish first; `keep` stops them where they are, and `resume_generation` continues them.
            clear_cache: Drop the prefix cache. With `keep`, running requests compute their keys and values again;
                otherwise they continue with those that they have.

        Raises:
            RequestError: There is no such mode, or the engine was resumed before all requests had finished.
        """
        self._require_alive()
        pausing: asyncio.Future[bool] | None = None
        was_running = False
        try:
            async with self._pause_lock:
                was_running = await self._client.call(IsSchedulerRunning())
                pausing = asyncio.ensure_future(self._client.call(PauseScheduler(mode, clear_cache)))
                paused = await asyncio.shield(pausing)
            while not paused:
                await asyncio.sleep(DRAIN_POLL_SECONDS)
                self._require_alive()
                if await self._client.call(IsSchedulerRunning()):
                    raise RequestError("The engine was resumed before its requests had finished, so it is not paused.")
                paused = await self._client.call(IsSchedulerPaused())
        except asyncio.CancelledError:
            if was_running and pausing is not None:  # nobody else would resume it
                await asyncio.shield(self._undo(pausing, ResumeScheduler()))
            raise

    async def resume_generation(self) -> None:
        """Continues after `pause_generation`.

        Raises:
            RequestError: A weight update is under way.
            EngineSleepingError: A weight update has failed, and the weights are unusable.
        """
        self._require_alive()
        async with self._pause_lock:
            await self._client.call(ResumeScheduler())

    async def is_paused(self) -> bool:
        """Whether no step runs until `resume_generation`, or until the end of a weight update."""
        self._require_alive()
        return await self._client.call(IsSchedulerPaused())

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | WeightTransferInfo) -> None:
        """Joins a trainer's process group on every worker; the trainer creates a WeightTransferGroup at the same time.

        Requests run while it waits for the trainer. If it is cancelled, the workers stop waiting.

        Args:
            init_info: The fields of `mvllm.messages.weights.WeightTransferInfo`.

        Raises:
            RequestError: A field is invalid, the group cannot be joined or is not complete after its timeout, or
                another call waits for a trainer.
        """
        self._require_alive()
        beginning = asyncio.ensure_future(self._client.call(InitWeightTransfer(transfer_info(init_info))))
        has_joined = False
        try:
            await asyncio.shield(beginning)
            while not (has_joined := await self._client.call(HasJoinedWeightTransfer(False))):
                await asyncio.sleep(JOIN_POLL_SECONDS)
                self._require_alive()
        finally:
            if not has_joined:
                await asyncio.shield(self._undo(beginning, HasJoinedWeightTransfer(give_up=True)))

    async def _undo(self, beginning: asyncio.Future[Any], command: EngineCommand[Any]) -> None:
        """Sends what ends a state that another call begins, if that call was not refused."""
        with contextlib.suppress(MvllmError):
            await beginning
            await self._client.call(command)

    async def start_weight_update(self) -> None:
        """Stops computing at the end of the step in flight, and begins a weight update of one or more parts. If it is
        cancelled, the update is abandoned.

        Raises:
            RequestError: An update is under way.
            EngineSleepingError: The weights sleep.
            PlatformError: The platform's worker does not support it.
        """
        self._require_alive()
        starting = asyncio.ensure_future(self.call_long(StartWeightUpdate()))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(self._undo(starting, AbandonWeightUpdate()))
            raise

    async def update_weights(
        self,
        update_info_: Mapping[str, Any] | None = None,
        /,
        *,
        path: str | None = None,
        shared_memory: str | None = None,
        safetensors: bytes | None = None,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None = None,
        names: list[str] | None = None,
        dtype_names: list[str] | None = None,
        shapes: list[list[int]] | None = None,
    ) -> None:
        """Loads weights into the running model, see `LLM.update_weights`. Goes on if the caller is cancelled."""
        self._require_alive()
        fields = {
            "path": path,
            "shared_memory": shared_memory,
            "safetensors": safetensors,
            "tensors": tensors,
            "names": names,
            "dtype_names": dtype_names,
            "shapes": shapes,
        }
        await run_to_end(self._update_weights({**fields, **(update_info_ or {})}))

    async def _update_weights(self, fields: Mapping[str, Any]) -> None:
        async with weight_update_in_thread(fields) as update:
            await self.call_long(UpdateWeights(update))

    async def finish_weight_update(
        self, weight_version: int | None = None, *, reset_running_requests: bool = False
    ) -> int:
        """Ends a weight update, see `LLM.finish_weight_update`."""
        self._require_alive()
        return await self.call_long(FinishWeightUpdate(weight_version, reset_running_requests))

    async def abandon_weight_update(self) -> None:
        """Ends a weight update without its remaining parts, see `LLM.abandon_weight_update`."""
        self._require_alive()
        await self._client.call(AbandonWeightUpdate())

    async def weight_info(self) -> dict[str, Any]:
        """`weight_version`, `is_updating`, and `failure`: why the weights are unusable, or None."""
        self._require_alive()
        return await self._client.call(WeightInfo())

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method of `worker_extension_cls` on every worker.

        Args:
            method: The method's name.
            args, kwargs: Its arguments: numbers, texts, bytes, lists and dicts.

        Returns:
            The results in rank order; those of all replicas.

        Raises:
            ConfigError: There is no such method.
            PlatformError: The method raised an exception, or its result cannot be sent to this process.
        """
        self._require_alive()
        return await self.call_long(CallWorkers(method, list(args), dict(kwargs or {})))

    async def call_long(self, command: EngineCommand[_R]) -> _R:
        """An answer that is counted in `num_long_calls` until it comes, also if the caller is cancelled."""
        return await run_to_end(self._counted(command))

    async def _counted(self, command: EngineCommand[_R]) -> _R:
        self.num_long_calls += 1
        try:
            return await self._client.call(command)
        finally:
            self.num_long_calls -= 1
