"""Weight updates of an engine core. They take effect between two steps, so weights are never written while a step reads
them, and all tokens of a step come from one version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mvllm.engine.core.answers import answers
from mvllm.engine.core.pause import Pause
from mvllm.engine.core.sleep import KV_CACHE, ReleasedMemory
from mvllm.engine.core.step_pipeline import StepPipeline
from mvllm.engine.core.weight_updates import WeightUpdateManager
from mvllm.messages.commands import (
    AbandonWeightUpdate,
    FinishWeightUpdate,
    HasJoinedWeightTransfer,
    InitWeightTransfer,
    StartWeightUpdate,
    UpdateWeights,
    WeightInfo,
)
from mvllm.messages.weights import WeightTransferInfo, WeightUpdate
from mvllm.scheduler.scheduler import Scheduler


class WeightCommands:
    """Writes new weights, in one or several parts, while the engine is paused.

    Args:
        manager: The transaction and the version.
        pause: Stops the steps meanwhile.
        memory: What sleeps.
        scheduler, steps: Those of the engine core.
        fail_all_requests: Ends all requests with an error.
    """

    def __init__(
        self,
        manager: WeightUpdateManager,
        pause: Pause,
        memory: ReleasedMemory,
        scheduler: Scheduler,
        steps: StepPipeline,
        fail_all_requests: Callable[[str], None],
    ) -> None:
        self._manager = manager
        self._pause = pause
        self._memory = memory
        self._scheduler = scheduler
        self._steps = steps
        self._fail_all_requests = fail_all_requests

    @answers(InitWeightTransfer)
    def init_transfer(self, info: WeightTransferInfo) -> None:
        """Lets the workers begin to join the process group of a trainer; steps run on.

        Raises:
            RequestError: An earlier call still waits for its trainer.
        """
        self._manager.join_group(info)

    @answers(HasJoinedWeightTransfer)
    def has_joined_transfer(self, give_up: bool) -> bool:
        """Whether all workers have joined the group of `init_transfer`.

        Raises:
            RequestError: The group cannot be joined, or its timeout has passed.
        """
        return self._manager.has_joined_group(give_up=give_up)

    @answers(StartWeightUpdate)
    def start(self) -> None:
        """Pauses the scheduler at the end of the step in flight, and begins a weight update.

        Raises:
            RequestError: One is under way.
            EngineSleepingError: The weights sleep.
            PlatformError: The platform's worker does not support it.
        """
        self._memory.require_weights("updating them")
        self._steps.collect_all()
        self._manager.start()
        self._pause.begin_update()

    @answers(UpdateWeights)
    def update(self, update: WeightUpdate) -> None:
        """Loads a part of the weights, see WeightUpdateManager. Without an open update, it is one of its own."""
        is_own = not self._manager.is_open
        if is_own:
            self.start()
            update = msgspec.structs.replace(update, is_only_part=True)
        try:
            self._manager.update(update)
            if is_own:
                self.finish()
        except BaseException:
            if is_own and self._manager.is_open:
                self.abandon()
            self._fail_requests_of_unusable_weights()
            raise

    @answers(FinishWeightUpdate)
    def finish(self, version: int | None = None, reset_running_requests: bool = False) -> int:
        """Ends a weight update, drops the prefix cache, and resumes if `start` has paused. Returns the new version.

        Running requests continue with the keys and values of the old weights, which no other request then shares,
        unless `reset_running_requests`.
        """
        old = self._manager.version
        try:
            # While the KV cache sleeps no step can run; `wake_up` warms up.
            self._manager.finish(version, warms_up=KV_CACHE not in self._memory.tags)
        except BaseException:
            self._fail_requests_of_unusable_weights()
            raise
        self._scheduler.close_weight_version(old)
        self._scheduler.forget_computed(restart=reset_running_requests)
        self._pause.end_update()
        return self._manager.version

    @answers(AbandonWeightUpdate)
    def abandon(self) -> None:
        """Ends a weight update without its remaining parts; if some were written, the weights are unusable."""
        self._manager.abandon()
        if self._manager.failure is None:
            self._pause.end_update()
        self._fail_requests_of_unusable_weights()

    @answers(WeightInfo)
    def info(self) -> dict[str, Any]:
        """The version of the weights, whether an update is under way, and why they are unusable, if they are."""
        manager = self._manager
        return {"weight_version": manager.version, "is_updating": manager.is_open, "failure": manager.failure}

    def reloaded(self) -> None:
        """Follows the workers, which have read the checkpoint again: weights that were unusable are not any more."""
        self._manager.reloaded()
        self._scheduler.restore_root()
        self._pause.end_update()  # paused by an update that has failed

    def _fail_requests_of_unusable_weights(self) -> None:
        if self._manager.failure is not None:
            self._fail_all_requests(self._manager.failure)
