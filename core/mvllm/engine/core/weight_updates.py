"""Weight updates of an engine core: one transaction from `start` to `finish`, and the version of the weights.

    start ──> update ... update ──> finish        version + 1, prefix cache dropped, steps run again
       │         │
       └─────────┴──> abandon                     nothing was written: as before; otherwise the weights are unusable

Parts are compared with the model on every worker before anything is written on any. If writing fails, or an update is
abandoned after a part was written, the weights are those of no version. Requests are then refused, and no step runs,
until another update that loads every weight of the model is finished, or sleep level 2 and wake_up have read the
checkpoint again.
"""

from __future__ import annotations

import contextlib

from mvllm.errors import EngineSleepingError, MvllmError, RequestError, WorkerDiedError, WorkerStuckError
from mvllm.executor.interface import Executor
from mvllm.messages.weights import WeightTransferInfo, WeightUpdate

_MAX_VERSION = 2**62
"""Versions are 64-bit integers in messages, and grow by one."""


class WeightUpdateManager:
    """The transaction and the version.

    Args:
        executor: Calls the workers.
        num_workers: Workers of the engine, which all join the process group of a trainer.

    Attributes:
        version: Version of the weights; 0 for those of the start.
        is_open: Whether an update has started and is not finished.
        failure: Why the weights are unusable; None if they are usable.
    """

    def __init__(self, executor: Executor, num_workers: int) -> None:
        self._executor = executor
        self._num_workers = num_workers
        self.version = 0
        self.is_open = False
        self.failure: str | None = None
        self._last_version = 0
        self._has_written = False

    def check_usable(self) -> None:
        """Raises EngineSleepingError if the weights are unusable."""
        if self.failure is not None:
            raise EngineSleepingError(self.failure)

    def check_can_run(self) -> None:
        """
        Raises:
            EngineSleepingError: The weights are unusable.
            RequestError: An update is open.
        """
        self.check_usable()
        if self.is_open:
            raise RequestError("A weight update is under way. Finish it before resuming.")

    def join_group(self, info: WeightTransferInfo) -> None:
        """Lets all workers begin to join the process group of a trainer, see `has_joined_group`.

        Raises:
            RequestError: A worker has no rank in the group, or still joins another one. None has begun.
        """
        with contextlib.suppress(RequestError):  # of an earlier call whose caller is gone
            self.has_joined_group()
        num_workers = self._num_workers
        if info.rank_offset + num_workers > info.world_size:
            raise RequestError(
                f"world_size is {info.world_size}, but {num_workers} workers from rank_offset {info.rank_offset} on "
                f"need {info.rank_offset + num_workers}: the trainer and all workers count. Raise world_size, or check "
                "rank_offset.",
                parameter="world_size",
            )
        self._executor.collective_rpc("init_weight_transfer", (info,))

    def has_joined_group(self, *, give_up: bool = False) -> bool:
        """Whether all workers have joined. If one cannot join, the others stop waiting.

        Args:
            give_up: Let all stop waiting.

        Raises:
            RequestError: A worker cannot join, or the timeout has passed.
        """
        try:
            return all(self._executor.collective_rpc("has_joined_weight_transfer", (give_up,)))
        except RequestError:
            self._executor.collective_rpc("has_joined_weight_transfer", (True,))
            raise

    def start(self) -> None:
        """Begins an update.

        Raises:
            RequestError: Another one is open.
            PlatformError: The platform's worker does not support it.
        """
        if self.is_open:
            raise RequestError(
                "A weight update is under way. Finish it (finish_weight_update) or abandon it (abandon_weight_update) "
                "before starting another."
            )
        self._executor.collective_rpc("start_weight_update")
        self.is_open, self._has_written = True, False

    def update(self, update: WeightUpdate) -> None:
        """Loads one part.

        Raises:
            RequestError: No update is open, or the part does not fit the model. Nothing was written.
            MvllmError: Writing failed; the weights are unusable.
        """
        self._require_open()
        try:
            self._executor.collective_rpc("check_weights", (update,))
        except (WorkerDiedError, WorkerStuckError):
            raise
        except MvllmError as e:
            raise RequestError(f"The weights do not fit; nothing was written. {e}", parameter="update_info") from e
        self._has_written = True
        try:
            self._executor.collective_rpc("update_weights", (update,))
        except BaseException as e:  # also a TimeoutError
            self._fail(f"a part of it could not be written ({str(e) or type(e).__name__})")
            self._drop_on_workers(e)
            raise

    def finish(self, version: int | None = None, *, warms_up: bool = True) -> None:
        """Ends the update; the weights get a new version.

        Args:
            version: The version; None for one more than the last.
            warms_up: Whether workers run steps before the next request if captured steps were dropped.

        Raises:
            RequestError: No update is open, tensors are missing, or the version is not larger than the last one. The
                update stays open.
        """
        self._require_open()
        is_valid = isinstance(version, int) and self._last_version < version < _MAX_VERSION
        if version is not None and not is_valid:
            raise RequestError(
                f"weight_version must be larger than the last version, {self._last_version}, and an integer below "
                f"2**62; found {version!r:.40}.",
                parameter="weight_version",
            )
        self._executor.collective_rpc("check_weight_update", (self.failure is not None,))
        try:
            moved = self._executor.collective_rpc("finish_weight_update")
            if any(moved) and warms_up:
                self._executor.collective_rpc("warm_up")
        except BaseException as e:
            self._fail(f"its last step failed ({str(e) or type(e).__name__})")
            self._drop_on_workers(e)
            raise
        self.is_open = False
        self.failure = None
        self.version = self._last_version = self._last_version + 1 if version is None else version

    def abandon(self) -> None:
        """Ends an update without its remaining parts. If it has written some, the weights are unusable."""
        self._require_open()
        self._executor.collective_rpc("abandon_weight_update")
        self.is_open = False
        if self._has_written:
            self._fail("it was abandoned after a part was written")

    def reloaded(self) -> None:
        """The workers have read the checkpoint of the start again."""
        self.version, self.failure = 0, None

    def _drop_on_workers(self, error: BaseException) -> None:
        """Frees what the workers hold for an update that has failed, unless a worker does not answer."""
        if isinstance(error, MvllmError) and not isinstance(error, WorkerDiedError | WorkerStuckError):
            with contextlib.suppress(MvllmError):
                self._executor.collective_rpc("abandon_weight_update")

    def _require_open(self) -> None:
        if not self.is_open:
            raise RequestError("No weight update is under way. Start one first (start_weight_update).")

    def _fail(self, reason: str) -> None:
        self.is_open = False
        self.failure = (
            f"The weights of the engine are unusable: an update after version {self.version} was not finished, because "
            f"{reason}. Update all weights again, or put the engine to sleep (level 2) and wake it up, which reads the "
            "checkpoint again."
        )
