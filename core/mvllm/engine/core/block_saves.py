"""Saves of cached blocks to host blocks and KV connectors, in steps without requests if need be."""

from __future__ import annotations

import time

from mvllm.engine.core.step_pipeline import StepPipeline
from mvllm.scheduler.scheduler import Scheduler

_WAIT_SECONDS = 0.01
"""The longest wait of a step that has nothing to compute: commands are handled between two waits."""

_SAVE_SECONDS = 5.0
"""Seconds for which blocks are still saved when the engine is shut down or put to sleep."""


class BlockSaves:
    """What is left to be saved, and the waits for connectors. Without tiers there is nothing.

    Args:
        scheduler: Its `kv_loads` start the saves.
        steps: Run them.
    """

    def __init__(self, scheduler: Scheduler, steps: StepPipeline) -> None:
        self._scheduler = scheduler
        self._loads = scheduler.kv_loads
        self._steps = steps

    @property
    def has_unsaved(self) -> bool:
        """Whether cached blocks are left to be saved."""
        return self._loads is not None and self._loads.has_unsaved

    def wait(self) -> bool:
        """Waits for KV connectors if there is nothing else to do; returns whether that is still so."""
        loads, scheduler = self._loads, self._scheduler
        if loads is None:
            return False
        for waits in (True, False):
            is_idle = scheduler.is_waiting_for_kv or (not scheduler.has_requests() and loads.has_unsaved)
            if self._steps.num_in_flight or not is_idle or loads.can_save:
                return False
            if waits:
                loads.wait(_WAIT_SECONDS)
                loads.start_plan()
        return True

    def save_all(self) -> None:
        """Saves what is left to be saved, while there are no requests; for a bounded time."""
        loads, deadline = self._loads, time.monotonic() + _SAVE_SECONDS
        while loads is not None and loads.has_unsaved and time.monotonic() < deadline:
            if loads.can_save:
                self._steps.launch()
                self._steps.collect_all()
            else:
                loads.wait(_WAIT_SECONDS)
                loads.start_plan()
